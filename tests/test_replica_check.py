"""What a step is checked for: that replicas stay equal, and that no worker waits for ever."""

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
from onebit_jax.programs.collective_check import check_collectives
from onebit_jax.programs.replica_check import check_replicas
from onebit_jax.states import placement
from tests.optimizers import OPTIMIZERS, WITH_NODES
from tests.small_task import MESH, NODES_MESH, dense, make_mesh, make_params, onebit
from tests.workers import PAIR

MESHES = {"data": MESH, PAIR: NODES_MESH}


def check(tx, axis_name: Any = "data", params=None, extra_args=None, mesh=None):
    """By shapes alone: nothing is compiled."""
    mesh = MESHES[axis_name] if mesh is None else mesh
    params = make_params() if params is None else params
    shapes = placement.state_shapes(tx, params, mesh)
    specs = placement.state_specs(shapes, mesh.axis_names)
    check_replicas(tx, params, shapes, specs, mesh, extra_args)


def of_updates(function):
    return optax.stateless(lambda updates, _: jax.tree.map(function, updates))


def labels(params):
    return jax.tree.map(lambda p: "vectors" if p.ndim < 2 else "matrices", params)


# What passes

LR = 1e-2
VARIANTS = {
    "one collective": functools.partial(onebit, exchange=ExchangeOptions(bucket_bytes=None)),
    "bfloat16": functools.partial(onebit, exchange=ExchangeOptions(residual_dtype="bfloat16")),
    "by variance": lambda axis_name: onebit_jax.onebit_adam(
        LR, warmup=onebit_jax.variance_stable(min_steps=2), axis_name=axis_name
    ),
    "not requantized": lambda axis_name: onebit_jax.birder(
        LR, axis_name=axis_name, seed=0, requantize=False
    ),
    "majority": lambda axis_name: onebit_jax.distributed_lion(LR, axis_name=axis_name),
    **{name: OPTIMIZERS[name].make for name in WITH_NODES},
}


# A single node of several devices averages at full precision.
WORKERS = {"flat": MESH, "nodes": NODES_MESH, "single node": make_mesh((1, 4), PAIR)}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_librarys_optimizers_pass(name, workers):
    mesh = WORKERS[workers]
    axis_name = PAIR if len(mesh.axis_names) > 1 else "data"
    check(VARIANTS[name](axis_name), axis_name, mesh=mesh)


@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if x not in WITH_NODES])
def test_those_of_one_axis_pass(name):
    check(OPTIMIZERS[name].make("data"))


@pytest.mark.parametrize("axis_name", MESHES, ids=["flat", "nodes"])
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "birder", "ef_signsgd"])
def test_wrappers_that_keep_the_phase_from_them_pass(name, axis_name):
    """As `optax.lookahead` does: the update then has the programs of all phases."""
    tx = OPTIMIZERS[name].make(axis_name)

    def update(updates, state, params=None):
        return tx.update(updates, state, params)

    check(optax.GradientTransformation(tx.init, update), axis_name)


@pytest.mark.parametrize("other", ["onebit_adam", "birder", "mean_gradients"])
def test_a_partition_of_zero_one_adam_and_another_passes(other):
    parts = {"matrices": "zero_one_adam", "vectors": other}
    check(optax.partition({x: OPTIMIZERS[y].make("data") for x, y in parts.items()}, labels))


@pytest.mark.parametrize("axis_name", MESHES, ids=["flat", "nodes"])
def test_an_exchange_of_the_users_own_passes(axis_name):
    gathered = lambda g: jnp.mean(lax.all_gather(g, axis_name), axis=0)  # noqa: E731
    check(optax.chain(of_updates(gathered), optax.adam(LR)), axis_name)
    check(optax.chain(of_updates(lambda g: lax.pmax(g, axis_name)), optax.adam(LR)), axis_name)


# Updates


@pytest.mark.parametrize(
    ("axis_name", "tx", "words"),
    [
        ("data", optax.sgd(LR), r"mean_gradients\('data'\) before"),
        (PAIR, optax.sgd(LR), r"over \('node', 'local'\).*mean_gradients\(\('node', 'local'\)\)"),
        (PAIR, of_updates(lambda g: lax.pmean(g, "node")), r"over \('node', 'local'\)"),
        (PAIR, of_updates(lambda g: lax.pmean(g, "local")), r"over \('node', 'local'\)"),
        ("data", of_updates(lambda g: lax.ppermute(g, "data", [(0, 1), (1, 0)])), "nothing"),
        ("data", of_updates(lambda g: lax.psum_scatter(jnp.ones(4), "data") + g), "nothing"),
        ("data", of_updates(lambda g: lax.pmean(g, "data") + lax.axis_index("data")), "nothing"),
    ],
    ids=["dense", "dense on nodes", "between nodes", "in nodes", "ppermute", "scatter", "index"],
)
def test_updates_that_differ_are_counted_and_named(axis_name, tx, words):
    message = rf"^the updates of 2 parameters, the first of them \['layer'\]\['bias'\].*{words}"
    with pytest.raises(ValueError, match=message):
        check(tx, axis_name)


def test_only_the_branch_that_exchanges_nothing_is_named():
    tx = optax.partition({"matrices": onebit(), "vectors": optax.sgd(LR)}, labels)
    message = r"^the updates of 1 parameters, .*\['bias'\].*in every branch that exchanges nothing"
    with pytest.raises(ValueError, match=message):
        check(tx)


# State


NAMED_CHAIN = optax.named_chain(("first", optax.trace(0.9)), ("second", onebit()))
BIAS = r"\['layer'\]\['bias'\], of "
LAST = optax.GradientTransformation(
    lambda params: {"last": params},
    lambda updates, state, params=None: (optax.tree.zeros_like(updates), {"last": updates}),
)


@pytest.mark.parametrize(
    ("axis_name", "tx", "words"),
    [
        (
            "data",
            optax.chain(optax.trace(0.9), onebit()),
            rf"opt_state\[0\]\.trace{BIAS}TraceState.*per_worker\(optax.trace"
            r"\(0.9\)\).*mean_gradients\('data'\)",
        ),
        (
            PAIR,
            optax.chain(optax.ema(0.9), onebit(PAIR)),
            rf"opt_state\[0\]\.ema{BIAS}EmaState.*\(\('node', 'local'\)\)",
        ),
        (
            "data",
            optax.apply_if_finite(optax.adamw(LR), 3),
            r"of ApplyIfFiniteState.*skip_nonfinite\(tx, axis\), by which all workers decide alike",
        ),
        ("data", NAMED_CHAIN, r"opt_state\['first'\]\.trace.*, of TraceState"),
        ("data", LAST, rf"opt_state\['last'\]{BIAS}dict, would differ"),
    ],
    ids=["trace", "nodes", "apply_if_finite", "named", "dict"],
)
def test_state_that_differs_unmarked_is_named_with_its_owner(axis_name, tx, words):
    with pytest.raises(ValueError, match=words):
        check(tx, axis_name)


def test_a_state_of_another_structure_is_named():
    """Of another tree, tests/test_wrappers.py has it."""
    lists = optax.GradientTransformation(
        lambda params: [jnp.zeros(())], lambda updates, state, params=None: (updates, tuple(state))
    )
    with pytest.raises(ValueError, match="they differ in the types of its nodes"):
        check(lists)


# Extra arguments


def scaled_by(*names, before):
    """An optimizer whose update needs numbers of these names."""

    def update(updates, state, params=None, *, phase=None, **given):
        if missing := [name for name in names if name not in given]:
            raise TypeError(f"missing {missing}")
        updates, state = before.update(updates, state, params)
        return jax.tree.map(lambda g: given[names[0]] * g, updates), state

    return optax.GradientTransformationExtraArgs(before.init, update)


def test_one_that_needs_a_value_is_checked():
    check(scaled_by("value", before=dense()))
    with pytest.raises(ValueError, match="nothing averages"):
        check(scaled_by("value", before=optax.sgd(LR)))


def test_one_that_needs_more_is_checked_once_it_is_known():
    check(scaled_by("temperature", before=optax.sgd(LR)))
    given = {"temperature": jnp.float32(2)}
    check(scaled_by("temperature", before=dense()), extra_args=given)
    with pytest.raises(ValueError, match="nothing averages"):
        check(scaled_by("temperature", before=optax.sgd(LR)), extra_args=given)
    with pytest.raises(TypeError, match="missing"):
        check(scaled_by("temperature", before=dense()), extra_args={})


def test_one_that_takes_no_other_argument_than_the_phase_is_checked():
    sgd = optax.sgd(LR)

    def update(updates, state, params=None, *, phase=None):
        return sgd.update(updates, state)

    with pytest.raises(ValueError, match="nothing averages"):
        check(optax.GradientTransformationExtraArgs(sgd.init, update))


def test_one_that_does_not_take_the_phase_is_told_how_to():
    sam = optax.contrib.sam(optax.sgd(LR), optax.sgd(LR))
    behind = lambda tx: optax.chain(onebit_jax.mean_gradients("data"), tx)  # noqa: E731
    with pytest.raises(
        ValueError, match=r"does not take 'phase'.*\*\*extra_args.*Transformation\("
    ):
        check(behind(sam))
    check(behind(optax.GradientTransformation(sam.init, sam.update)))


# Lookahead


def test_lookahead_is_told_how_to():
    fast = onebit()
    lookahead = optax.lookahead(fast, 5, 0.5)
    pair = optax.LookaheadParams.init_synced(make_params())
    for params in (pair, make_params()):
        with pytest.raises(ValueError, match=r"^optax.lookahead takes.*params\.fast.*jnp\.copy"):
            check(lookahead, params=params)

    def update(updates: Any, state, params=None):
        return lookahead.update(updates.fast, state, params)

    check(optax.GradientTransformation(lookahead.init, update), params=pair)


def test_other_errors_stay_as_they_are():
    def update(updates, state, params=None):
        raise ValueError("one of the optimizer's own")

    with pytest.raises(ValueError, match=r"^one of the optimizer's own"):
        check(optax.GradientTransformation(optax.identity().init, update))


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
    check_collectives(jax.jit(mapped).trace(*shapes).jaxpr.jaxpr)


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


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_empty_parameters_may_be_all_that_an_optimizer_has(shape):
    params = {"matrix": jnp.zeros((7, 5)), "empty": jnp.zeros(shape)}
    onebit_jax.init(onebit_jax.onebit_muon(1e-2, axis_name="data"), params, MESH)
    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.adam(1e-2))
    onebit_jax.init(tx, {"empty": params["empty"]}, MESH)


def test_what_init_has_checked_a_step_does_not_trace_again():
    traced = []

    def update(updates, state, params=None):
        del params
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
    other = {"w": jnp.zeros(4)}
    onebit_jax.init(tx, other, MESH)
    assert len(traced) == 3
