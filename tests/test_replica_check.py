"""What an optimizer is checked for: that replicas stay equal, and that no worker waits for ever."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.programs.jaxprs import axes_of_results
from onebit_jax.states.placement import Workers
from tests.optimizers import OPTIMIZERS, WITH_NODES
from tests.small_task import MESH, NODES_MESH, dense, make_mesh, make_params, onebit
from tests.workers import PAIR

MESHES = {"data": MESH, PAIR: NODES_MESH}
LR = 1e-2


def check(tx, axis_name: Any = "data", extra_args=None, mesh=None):
    """By shapes alone: nothing is compiled."""
    mesh = MESHES[axis_name] if mesh is None else mesh
    Workers(tx, mesh).check(make_params(), extra_args)


def of_updates(function):
    return optax.stateless(lambda updates, _: jax.tree.map(function, updates))


# Optimizers that pass


VARIANTS = {
    "one collective": functools.partial(onebit, exchange=ExchangeOptions(bucket_bytes=None)),
    "bfloat16": functools.partial(onebit, exchange=ExchangeOptions(residual_dtype="bfloat16")),
    "by variance": lambda axis_name: onebit_jax.onebit_adam(
        LR, warmup=onebit_jax.variance_stable(min_steps=2), axis_name=axis_name
    ),
    **{name: optimizer.make for name, optimizer in OPTIMIZERS.items()},
}
# A single node of several devices averages at full precision.
FAST = ("onebit_adam, refreshed", "zero_one_adam", "local_steps, streaming")
MESHES_OF = {"flat": MESH, "nodes": NODES_MESH, "single node": make_mesh((1, 4), PAIR)}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(
            name, workers, marks=() if workers == "flat" or name in FAST else pytest.mark.slow
        )
        for name in VARIANTS
        for workers in MESHES_OF
        if workers == "flat" or name in WITH_NODES or name not in OPTIMIZERS
    ],
)
def test_the_librarys_optimizers_pass(name, workers):
    mesh = MESHES_OF[workers]
    axis_name = PAIR if len(mesh.axis_names) > 1 else "data"
    check(VARIANTS[name](axis_name), axis_name, mesh=mesh)


@pytest.mark.parametrize("name", ["onebit_adam", "birder", "zero_one_adam", "local_steps"])
def test_wrappers_that_keep_the_phase_from_them_pass(name):
    """As `optax.lookahead` does: the update then has the programs of all phases."""
    tx = OPTIMIZERS[name].make("data")

    def update(updates, state, params=None):
        return tx.update(updates, state, params)

    check(optax.GradientTransformation(tx.init, update))


@pytest.mark.parametrize("other", ["onebit_adam", "birder", "mean_gradients"])
def test_a_partition_of_zero_one_adam_and_another_passes(other):
    parts = {"matrices": "zero_one_adam", "vectors": other}
    labels = lambda params: jax.tree.map(  # noqa: E731
        lambda p: "vectors" if p.ndim < 2 else "matrices", params
    )
    check(optax.partition({x: OPTIMIZERS[y].make("data") for x, y in parts.items()}, labels))


@pytest.mark.parametrize("axis_name", MESHES, ids=["flat", "nodes"])
def test_an_exchange_of_the_users_own_passes(axis_name):
    gathered = lambda g: jnp.mean(lax.all_gather(g, axis_name), axis=0)  # noqa: E731
    check(optax.chain(of_updates(gathered), optax.adam(LR)), axis_name)
    check(optax.chain(of_updates(lambda g: lax.pmax(g, axis_name)), optax.adam(LR)), axis_name)


# Updates and states that would differ; docs/wrappers.md and tests/test_wrappers.py have more.


@pytest.mark.parametrize(
    ("axis_name", "tx", "words"),
    [
        ("data", optax.sgd(LR), r"mean_gradients\('data'\) before"),
        (PAIR, optax.sgd(LR), r"mean_gradients\(\('node', 'local'\)\)"),
        (PAIR, of_updates(lambda g: lax.pmean(g, "node")), r"mean_gradients\(\('node', 'local'\)"),
        (PAIR, of_updates(lambda g: lax.pmean(g, "local")), r"mean_gradients\(\('node', 'local'\)"),
        ("data", of_updates(lambda g: lax.ppermute(g, "data", [(0, 1), (1, 0)])), "jax.lax.pmean"),
        ("data", of_updates(lambda g: lax.psum_scatter(jnp.ones(4), "data") + g), "jax.lax.pmean"),
        (
            "data",
            of_updates(lambda g: lax.pmean(g, "data") + lax.axis_index("data")),
            "jax.lax.pmean",
        ),
    ],
    ids=["dense", "dense on nodes", "between nodes", "in nodes", "ppermute", "scatter", "index"],
)
def test_updates_that_differ_are_counted_and_named(axis_name, tx, words):
    message = rf"^updates\['layer'\]\['bias'\] would differ.*{words}"
    with pytest.raises(ValueError, match=message):
        check(tx, axis_name)


NAMED_CHAIN = optax.named_chain(("first", optax.trace(0.9)), ("second", onebit()))
LAST = optax.GradientTransformation(
    lambda params: {"last": params},
    lambda updates, state, params=None: (optax.tree.zeros_like(updates), {"last": updates}),
)


@pytest.mark.parametrize(
    ("axis_name", "tx", "name"),
    [
        (PAIR, optax.chain(optax.ema(0.9), onebit(PAIR)), r"\[0\].ema\['layer'\]\['bias'\]"),
        ("data", NAMED_CHAIN, r"\['first'\]\.trace"),
        ("data", LAST, r"\['last'\]\['layer'\]\['bias'\]"),
    ],
    ids=["nodes", "named", "dict"],
)
def test_state_that_differs_unmarked_is_named(axis_name, tx, name):
    with pytest.raises(ValueError, match=rf"^opt_state{name}.* would differ.*per_worker"):
        check(tx, axis_name)


# Extra arguments


def scaled_by(*names, before):
    """An optimizer whose update needs numbers of these names."""

    def update(updates, state, params=None, *, phase=None, **given):
        if missing := [name for name in names if name not in given]:
            raise TypeError(f"missing {missing}")
        updates, state = before.update(updates, state, params)
        return jax.tree.map(lambda g: given[names[0]] * g, updates), state

    return optax.GradientTransformationExtraArgs(before.init, update)


def test_one_that_needs_a_value_is_checked_and_one_that_needs_more_once_it_is_known():
    check(scaled_by("value", before=dense()))
    with pytest.raises(ValueError, match=r"^updates.* would differ"):
        check(scaled_by("value", before=optax.sgd(LR)))
    check(scaled_by("temperature", before=optax.sgd(LR)))
    check(scaled_by("temperature", before=dense()), extra_args={"temperature": jnp.float32(2)})
    tx = scaled_by("temperature", before=optax.sgd(LR))
    state = onebit_jax.init(tx, make_params(), MESH)
    step = onebit_jax.train_step(lambda p, x: jnp.mean(p["layer"]["bias"] * jnp.mean(x)), tx, MESH)
    with pytest.raises(ValueError, match=r"^updates.* would differ"):
        step(make_params(), state, jnp.ones(8), temperature=jnp.float32(2))
    with pytest.raises(TypeError, match="missing"):
        step(make_params(), state, jnp.ones(8))


def test_what_init_has_checked_a_step_does_not_trace_again():
    traced = []

    def update(updates, state, params=None):
        traced.append(updates)
        return updates, state

    counting = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = optax.chain(onebit_jax.mean_gradients("data"), counting)
    params = {"w": jnp.zeros(3)}
    state = onebit_jax.init(tx, params, MESH)
    assert len(traced) == 1
    step = onebit_jax.train_step(lambda p, x: jnp.mean(p["w"] * x), tx, MESH)
    step.lower(params, state, jnp.ones((8, 3)))
    assert len(traced) == 2
    onebit_jax.init(tx, {"w": jnp.zeros(4)}, MESH)
    assert len(traced) == 3


# Programs in which workers would wait for each other for ever, and others that only look so.


def check_waits(f):
    """Checks ``f(own, common)``, of what each of four workers has for itself and what all share."""
    mesh = jax.make_mesh((2, 2), ("node", "local"), devices=jax.devices()[:4])
    specs = P(("node", "local")), P()
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for spec in specs
    ]
    axes_of_results(jax.jit(mapped).trace(*shapes).jaxpr.jaxpr)


EVERYWHERE = ("node", "local")


def exchange_if(flag, x, axes=EVERYWHERE):
    return lax.cond(flag, lambda x: lax.pmean(x, axes), lambda x: x, x)


def exchange_while(flag, x):
    def turn(carry):
        return jnp.any(carry[1] < 0), jax.jit(lambda x: lax.psum(x, EVERYWHERE))(carry[1])

    return lax.while_loop(lambda carry: carry[0], turn, (flag, x))[1]


REFUSED = {
    "own value": lambda own, common: exchange_if(jnp.isfinite(own[0]), common),
    "own index": lambda own, common: exchange_if(lax.axis_index("node") == 0, own),
    "condition made in a loop": lambda own, common: exchange_if(
        lax.fori_loop(0, 3, lambda _, x: x + own[0], 0.0) > 0, common
    ),
    "condition chosen by another": lambda own, common: exchange_if(
        lax.cond(own[0] > 0, lambda: True, lambda: False), common
    ),
    "loop": lambda own, common: exchange_while(own[0] > 0, common),
    "loop that comes to it in its second turn": lambda own, common: exchange_while(
        common[0] > 0, own
    ),
    "shared within a node only": lambda own, common: exchange_if(
        lax.psum(own, "local")[0] > 0, common
    ),
    "after an all-to-all": lambda own, common: exchange_if(
        lax.all_to_all(common, "node", 0, 0, tiled=True)[0] > 0, common
    ),
}
ACCEPTED = {
    "common value": lambda own, common: exchange_if(common[0] > 0, own),
    "flag of all": lambda own, common: exchange_if(
        lax.pmin(jnp.isfinite(own[0]).astype(jnp.int32), EVERYWHERE) > 0, own
    ),
    "gathered": lambda own, common: exchange_if(lax.all_gather(own, EVERYWHERE)[0, 0] > 0, own),
    "nothing exchanged": lambda own, common: lax.cond(own[0] > 0, jnp.sin, jnp.cos, own),
    "shared as far as it is exchanged": lambda own, common: exchange_if(
        lax.axis_index("node") == 0, own, "local"
    ),
    "own values beside a common condition": lambda own, common: lax.scan(
        lambda x, _: (lax.optimization_barrier((x[0], x[1] + exchange_if(x[0] > 0, own))), None),
        (common[0], own),
        length=2,
    )[0][1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_condition_that_workers_do_not_share_is_refused(name):
    with pytest.raises(ValueError, match=r"under a condition that workers along \['(local|node)"):
        check_waits(REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_condition_that_they_share_is_not(name):
    check_waits(ACCEPTED[name])
