"""What other people's programs do: each was silent, or failed in words that helped nobody."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, serialization
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import contrib
from onebit_jax.sharding import check_step, on_mesh, worker_copies, worker_step
from onebit_jax.watching.healthy_ranges import warnings_of
from tests.optimizers import OPTIMIZERS
from tests.workers import make_mesh

MESH = make_mesh((2,), ("data",))
DEVICES = jax.devices()[:2]
WARMUP = 3
pmap = functools.partial(jax.pmap, axis_name="batch", devices=DEVICES)


def adam(axis_name="data", warmup_bits=32, **options):
    # Bits in the warm-up would take longer to compile.
    return onebit_jax.onebit_adam(
        1e-2, warmup=WARMUP, warmup_bits=warmup_bits, axis_name=axis_name, **options
    )


def given_loss(params, batch):
    """Its gradients are the means of a worker's rows of the batch."""
    return sum(jnp.sum(params[name] * jnp.mean(batch[name], 0)) for name in params)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(tx, params, batches, loss_fn=given_loss, mesh=MESH, **options):
    """Parameters, state and metrics after some steps."""
    params, metrics = jax.device_get(params), {}  # a step donates
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh, **options)
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
    return params, opt_state, metrics


def warned_of(diagnosis, figure):
    return [text for text in diagnosis.warnings if text.startswith(figure)]


# Silent.

FROZEN = {
    "onebit_adam_published": lambda: onebit_jax.onebit_adam_published(
        1e-3, warmup=WARMUP, axis_name="data"
    ),
    "onebit_adam": lambda: adam(variance_refreshes=None),
    "onebit_lamb_published": lambda: contrib.onebit_lamb_published(
        1e-3, warmup=WARMUP, axis_name="data"
    ),
    "zero_one_adam": lambda: onebit_jax.zero_one_adam(
        1e-3, variance_freeze=WARMUP, axis_name="data"
    ),
}


PUBLISHED = [pytest.param(x, marks=pytest.mark.slow) for x in FROZEN if "published" in x]


@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam", *PUBLISHED])
def test_gradients_that_a_frozen_variance_ignores_are_told_of_by_tensor(name):
    tx, params = FROZEN[name](), {"late": np.ones(8, np.float32), "w": np.ones(8, np.float32)}
    step = onebit_jax.train_step(given_loss, tx, MESH)
    # Others than 1 are no gradients: rounding errors may be that large.
    for late in (0, np.float32(1e-10), 1):
        params_after, opt_state = params, onebit_jax.init(tx, params, MESH)
        for i in range(18):
            batch = {"late": (i > 4) * late * draw(i, 4, 8), "w": draw(i, 4, 8)}
            params_after, opt_state, _ = step(params_after, opt_state, batch)
        found = warned_of(onebit_jax.diagnose(params_after, opt_state, MESH), "ignored_share")
        assert len(found) == (late == 1)
    assert found[0].startswith("ignored_share of ['late']=1: ")
    np.testing.assert_array_equal(params_after["late"], 1)


def test_a_refresh_ends_that():
    params = {"late": jnp.ones(8), "w": jnp.ones(8)}
    batches = [{"late": (i > 4) * draw(i, 4, 8), "w": draw(i, 4, 8)} for i in range(22)]
    params, opt_state, _ = run(adam(variance_refreshes=20), params, batches)
    assert "ignored_share of ['late']" not in onebit_jax.diagnose(params, opt_state, MESH).figures
    assert np.all(np.asarray(params["late"]) != 1)


def test_stacked_matrices_are_updated_as_separate_ones():
    one = AxisType.Auto
    mesh, stacked = make_mesh((1,), ("data",), one), {"w": draw(0, 3, 4, 6), "scale": draw(1, 3, 4)}
    apart = {f"w{i}": stacked["w"][i] for i in range(3)}
    numbers = {"w": optax.contrib.MuonDimensionNumbers(1, 2), "scale": None}

    def updates(params, matrices):
        tx = onebit_jax.onebit_muon(
            0.1, axis_name="data", bits=32, matrices=matrices, adam_learning_rate=1e-3
        )
        return run(tx, params, [jax.tree.map(lambda x: x[None], params)], mesh=mesh)[0]

    together = updates(stacked, lambda _: numbers)
    of_each = updates(apart, None)
    for i in range(3):
        np.testing.assert_allclose(together["w"][i], of_each[f"w{i}"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together["scale"], stacked["scale"], atol=2e-3)


class State(TrainState):
    scale: DynamicScale | None = None


PARAMS = {"b": jnp.zeros(2), "w": jnp.ones((3, 2))}


def quadratic(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)


def state_of(tx, **fields):
    def create(params):
        return State.create(apply_fn=None, params=params, tx=tx, **fields)

    return pmap(create)(jax_utils.replicate(PARAMS, DEVICES))


def made(how):
    """A step of `pmap`, and a state for it."""

    @pmap
    def step(state, x):
        loss, grads = jax.value_and_grad(quadratic)(state.params, x)
        return state.apply_gradients(
            grads=lax.pmean(grads, "batch") if how == "pmean" else grads
        ), loss

    @pmap
    def scaled(state, x):
        name = "batch" if how == "scale with axis_name" else None
        scale, is_fin, loss, grads = state.scale.value_and_grad(quadratic, axis_name=name)(
            state.params, x
        )
        if how == "scale by pmin":
            is_fin = lax.pmin(is_fin.astype(jnp.int32), "batch") > 0
            scale = jax.tree.map(lambda x: lax.pmin(x, "batch"), scale)
        new = state.apply_gradients(grads=grads)
        kept = jax.tree.map(lambda x, old: jnp.where(is_fin, x, old), new, state)
        return kept.replace(scale=scale, step=new.step), loss

    tx = {
        "plain adamw": optax.adamw(1e-3),
        "partition": optax.partition(
            {"bits": adam("batch"), "dense": optax.adamw(1e-3)}, {"b": "dense", "w": "bits"}
        ),
        "masked": optax.masked(adam("batch"), {"b": False, "w": True}),
        "trace": optax.chain(
            optax.trace(0.9), onebit_jax.compressed_mean("batch"), optax.sgd(1e-2)
        ),
        "local": OPTIMIZERS["local_steps"].make("batch"),
    }.get(how, adam("batch"))
    if "scale" in how:
        return scaled, state_of(tx, scale=DynamicScale())
    return step, state_of(tx)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("pmean", "gradients .* are the same on all workers along 'batch'.*pmean"),
        ("scale with axis_name", "same on all workers along 'batch'.*DynamicScale"),
        ("scale without", "state.* would differ between workers.*pmin"),
        ("plain adamw", r"state.params\['b'\] would differ.*mean_gradients\('batch'\)"),
        ("partition", r"state.params\['b'\] would differ.*optax.partition"),
        ("masked", r"state.params\['b'\] would differ.*optax.masked"),
        ("trace", r"trace\['b'\] would differ.*per_worker"),
        ("own gradients", None),
        ("scale by pmin", None),
        ("local", None),
    ],
)
def test_a_step_of_pmap_is_checked(how, words):
    step, state = made(how)
    batch = draw(0, 2, 4, 3)
    if words is None:
        check_step(step, state, batch, axis_name="batch")
    else:
        with pytest.raises(ValueError, match=words):
            check_step(step, state, batch, axis_name="batch")


@functools.cache
def pmap_run():
    """A state after the freeze, and the step."""
    step, state = made("own gradients")
    for i in range(6):
        state, _ = step(state, draw(i, 2, 4, 3))
    return step, state


PMAP_MESH = make_mesh((2,), ("batch",))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_of_pmap_is_diagnosed(kind):
    _, state = pmap_run()
    mesh = make_mesh((2,), ("batch",), kind)
    diagnosis = onebit_jax.diagnose(state.params, state.opt_state, mesh, step=int(state.step[0]))
    assert diagnosis.warnings == ()
    assert "params['w']" in diagnosis.compared
    rows = state.params | {"w": state.params["w"] + jnp.array([0.0, 1.0])[:, None, None]}
    with pytest.raises(onebit_jax.ReplicaDivergenceError, match=r"params\['w'\]"):
        onebit_jax.diagnose(rows, state.opt_state, mesh)


def test_a_state_of_which_one_workers_copy_was_saved_is_told_of():
    step, state = pmap_run()
    whole = serialization.from_bytes(state, serialization.to_bytes(jax.device_get(state)))
    one = jax_utils.replicate(jax_utils.unreplicate(state), DEVICES)
    [words] = onebit_jax.diagnose(one.params, one.opt_state, PMAP_MESH).warnings
    assert words.startswith("workers_alike")
    assert "restore" in words
    again, _ = step(whole, draw(6, 2, 4, 3))
    assert onebit_jax.diagnose(again.params, again.opt_state, PMAP_MESH).warnings == ()


def test_a_fresh_state_beside_restored_parameters_is_told_of():
    _, state = pmap_run()
    fresh = state_of(adam("batch"))
    [words] = onebit_jax.diagnose(state.params, fresh.opt_state, PMAP_MESH, step=6).warnings
    assert words.startswith("missing_updates=1: ")
    assert warnings_of({"missing_updates": 0.05}, 2) == ()


@pytest.mark.slow
def test_parameters_whose_updates_round_to_nothing_are_told_of():
    params = {"small": jnp.full(8, 0.01, jnp.bfloat16), "w": jnp.ones(8, jnp.bfloat16)}
    batches = [{name: 1 + draw(i, 4, 8) for name in params} for i in range(5)]
    for rate, names in ((6e-4, ["w"]), (6e-2, [])):
        tx = onebit_jax.onebit_adam(rate, warmup=WARMUP, warmup_bits=32, axis_name="data")
        after, opt_state, _ = run(tx, params, batches)
        found = warned_of(onebit_jax.diagnose(after, opt_state, MESH), "unmoved_share")
        assert [text[: text.index("=")] for text in found] == [
            f"unmoved_share of ['{name}']" for name in names
        ]


def test_adams_moments_are_taken_by_path():
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    adam_state = optax.ScaleByAdamState(
        jnp.int32(5),
        mu={"a": jnp.ones(3), "b": jnp.zeros(3)},
        nu=dict(reversed({"a": jnp.ones(3), "b": jnp.full(3, 4.0)}.items())),
    )
    shuffled = adam_state._replace(mu=eqx.filter({"b": jnp.zeros(3), "a": jnp.ones(3)}, True))
    states = [onebit_jax.from_adam(x, adam(), params, MESH) for x in (adam_state, shuffled)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    with pytest.raises(ValueError, match=r"for the parameter \['b'\]") as error:
        onebit_jax.from_adam(adam_state._replace(mu={"a": jnp.ones(3)}), adam(), params, MESH)
    assert len(str(error.value)) < 300


def test_what_drifts_is_documented():
    for f in (onebit_jax.signum, onebit_jax.distributed_lion, onebit_jax.birder):
        assert "learning rates in one direction" in " ".join(str(f.__doc__).split())
    assert "trust_ratio" in str(onebit_jax.scale_by_onebit_adam.__doc__)


# Obscure.


def test_masks_and_matrices_may_be_modules():
    params = eqx.filter(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    mask = jax.tree.map(lambda x: x.ndim > 1, params)
    onebit_jax.init(adam(weight_decay=0.1, mask=mask), params, MESH)
    muon = onebit_jax.onebit_muon(0.1, axis_name="data", matrices=mask, adam_learning_rate=1e-3)
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    jax.eval_shape(jax.vmap(lambda p: muon.update(p, muon.init(p), p), axis_name="data"), rows)
    split = make_mesh((2, 1), ("data", "fsdp"))
    specs = jax.tree.map(lambda _: P(), params)
    onebit_jax.init(adam(), params, split, axis_name="data", param_specs=specs)


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(2)(nn.Embed(8, 4)(ids))


def test_a_model_with_an_embedding_is_evaluated():
    mesh, model = make_mesh((2,), ("data",), AxisType.Auto), Embedded()
    ids = np.arange(8).reshape(4, 2)
    params = model.init(jax.random.key(0), ids)
    params, *_ = run(
        adam(), params, [ids], lambda p, x: jnp.mean(jnp.asarray(model.apply(p, x)) ** 2), mesh
    )
    rows = jax.device_put(ids, NamedSharding(mesh, P("data")))
    assert jax.jit(model.apply)(params, rows).shape == (4, 2, 2)


@pytest.mark.parametrize(
    "constrain",
    [
        lambda x: lax.with_sharding_constraint(x, P("data")),
        lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("data"))),
        lambda x: jax.reshard(x, P("data")),
        lambda x: x.at[jnp.arange(2)].get(out_sharding=P("data")),
    ],
)
def test_constraints_over_the_workers_axis_are_told_of(constrain):
    with pytest.raises(Exception, match=r"data|spec") as error:
        run(
            adam(),
            {"w": jnp.ones(2)},
            [np.ones((4, 2))],
            lambda p, x: jnp.sum(constrain(x * p["w"])),
        )
    assert any("leave them out of sharding" in note for note in error.value.__notes__)


def contrastive(params, x):
    h = x @ params["w"]
    return jnp.mean(jnp.tanh(h @ lax.all_gather(h, "data", tiled=True).T))


@pytest.mark.slow
def test_collectives_in_a_loss_beside_a_split_model():
    mesh = make_mesh((2, 2), ("data", "model"), AxisType.Auto)
    specs, x, w = {"w": P(None, "model")}, draw(0, 8, 3), draw(1, 3, 4)
    params = {"w": jax.device_put(w, NamedSharding(mesh, specs["w"]))}
    how = {"axis_name": "data", "param_specs": specs}
    step = onebit_jax.train_step(contrastive, adam(), mesh, **how)
    loss = step(dict(params), onebit_jax.init(adam(), params, mesh, **how), x)[2]["loss"]
    np.testing.assert_allclose(loss, np.mean(np.tanh((x @ w) @ (x @ w).T)), rtol=1e-4)
    tx = on_mesh(adam(), mesh, axis_name="data", specs=specs)

    def own_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(contrastive)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = {"w": jax.device_put(w, NamedSharding(mesh, specs["w"]))}
    state = worker_copies((params, tx.init(params)), mesh, axis_name="data")
    _, metrics = jax.jit(worker_step(own_step, mesh, axis_name="data"))(state, x)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


def tokens(params, batch):
    losses = (batch["x"] @ params["w"] - 1) ** 2
    return onebit_jax.WeightedLoss(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))


def test_a_worker_and_a_microbatch_may_have_no_token():
    batch = {"x": draw(0, 16, 3), "mask": np.float32(np.arange(16) < 5)}
    w = draw(1, 3)
    metrics = run(adam(), {"w": w}, [batch], tokens, accumulation=2)[2]
    np.testing.assert_allclose(metrics["loss"], np.mean((batch["x"] @ w - 1)[:5] ** 2), rtol=1e-5)
    assert metrics["skipped"] == 0


def test_many_skipped_steps_are_told_of_though_never_in_a_row():
    batches = [{"w": np.full((4, 2), np.nan if i % 2 else 1.0, np.float32)} for i in range(30)]
    with pytest.warns(UserWarning, match=r"steps were skipped.*WeightedLoss"):
        run(adam(), {"w": jnp.ones(2)}, batches)


def test_states_of_another_kind_are_told_of_in_words():
    tx = adam("batch")
    placed = onebit_jax.init(tx, PARAMS, PMAP_MESH)
    made: Any = State
    placed = made(step=0, apply_fn=None, params=PARAMS, tx=tx, opt_state=placed)
    step, _ = pmap_run()
    with pytest.raises(ValueError, match=r"PerWorker's value has shape.*for pmap and vmap"):
        step(jax_utils.replicate(placed, DEVICES), draw(0, 2, 4, 3))
    scale = onebit_jax.scale_by_onebit_adam(axis_name="batch")
    for state in ([1.0], {"progress": 1.0}):
        with pytest.raises(ValueError, match="not what init returned"):
            jax.vmap(lambda p, s=state: scale.update(p, s, p), axis_name="batch")(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="no axis 'batch' is bound here") as error:
        jax.pmap(scale.init, devices=DEVICES)(jnp.ones((2, 3)))
    assert "_internal" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": np.array(1e-3)},
        {"learning_rate": np.float64(1e-3)},
        {"learning_rate": jnp.bfloat16(1e-3)},
        {"warmup": np.array(5)},
        {"warmup_bits": np.int64(4)},
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(options):
    options = {"learning_rate": 1e-3, "warmup": 5, "axis_name": "data"} | options
    onebit_jax.init(onebit_jax.onebit_adam(**options), {"w": jnp.ones(2)}, MESH)


@pytest.mark.parametrize(
    "leaf",
    [jax.nn.relu, np.array([None]), jnp.ones(2, jnp.complex64), jax.ShapeDtypeStruct((2,), "f4")],
    ids=["a function", "an object array", "complex", "a shape"],
)
def test_a_leaf_that_is_no_array_of_floats_is_named(leaf):
    with pytest.raises(ValueError, match=r"parameter \['f'\]"):
        onebit_jax.init(adam(), {"f": leaf, "w": jnp.ones(2)}, MESH)


# New warnings stay silent.


FAST = ("onebit_adam, refreshed", "signum", "onebit_muon", "local_steps")


@pytest.mark.parametrize(
    "name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in OPTIMIZERS]
)
def test_healthy_runs_have_none_of_the_new_warnings(name):
    params = {"b": jnp.ones(4), "w": draw(0, 6, 4)}
    batches = [jax.tree.map(lambda p, i=i: 0.5 + draw(i, 4, *p.shape), params) for i in range(12)]
    params, opt_state, _ = run(OPTIMIZERS[name].make("data"), params, batches)
    found = onebit_jax.diagnose(params, opt_state, MESH, step=len(batches))
    for figure in ("ignored_share", "unmoved_share", "missing_updates", "workers_alike"):
        assert not warned_of(found, figure)
