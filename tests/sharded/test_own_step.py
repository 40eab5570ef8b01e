"""The training step of this library on a model that is split over the fast axes of a mesh."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.algorithm import PHASES
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import make_mesh

BOTH = pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])


def trained(step, params, opt_state, batches):
    found = []
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
        found.append(jax.device_get(metrics))
    return params, opt_state, found


def on_whole_model(tx, steps, **options):
    """The same on two workers that have all of the model each."""
    mesh, task = make_mesh((2,), (SLOW,)), meshes.task("fsdp, tensor", "Auto")

    def put(tree, spec):
        return jax.device_put(jax.device_get(tree), NamedSharding(mesh, spec))

    params = put(task.params(), P())
    small = meshes.Task(mesh, dict.fromkeys(params, P()), ())
    step = onebit_jax.train_step(small.loss, tx, mesh, **options)
    batches = [put(task.batch(0), P(SLOW))] * steps
    return trained(step, params, onebit_jax.init(tx, params, mesh), batches)


@BOTH
def test_dense_steps_are_those_of_a_whole_model(kind):
    options: Any = {"max_grad_norm": 0.5, "accumulation": 4}
    tx = optax.chain(onebit_jax.mean_gradients(SLOW), optax.adamw(1e-2))
    task = meshes.task("fsdp, tensor", kind)
    params, opt_state, step = task.begin_own(tx, **options)
    params, _, found = trained(step, params, opt_state, [task.batch(0)] * 6)
    expected, _, wanted = on_whole_model(tx, 6, **options)
    # Adam's step does not depend on a gradient's size: of one near 0 rounding decides a part of it.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3),
        jax.device_get(params),
        jax.device_get(expected),
    )
    for got, want in zip(found, wanted, strict=True):
        assert {k: float(x) for k, x in got.items()} == pytest.approx(
            {k: float(x) for k, x in want.items()}, rel=1e-4
        )


@pytest.mark.slow
def test_slow_and_fast_axes_may_be_of_two_types():
    tx, specs, ends = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW), P(None, "model"), []

    def loss_fn(w, x):
        return jnp.mean((x @ w - 1) ** 2)

    for kinds in (("Auto", "Auto"), ("Explicit", "Auto"), ("Auto", "Explicit")):
        types = tuple(meshes.TYPES[kind] for kind in kinds)
        mesh = jax.make_mesh((2, 2), (SLOW, "model"), devices=jax.devices()[:4], axis_types=types)
        split: Any = {"axis_name": SLOW, "param_specs": specs if kinds[1] == "Auto" else None}
        w = jax.device_put(np.zeros((16, 8), np.float32), NamedSharding(mesh, specs))
        opt_state = onebit_jax.init(tx, w, mesh, **split)
        step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
        place, draw = NamedSharding(mesh, P(SLOW)), np.random.default_rng(0).standard_normal
        batches = [jax.device_put(draw((16, 16), np.float32), place) for _ in range(4)]
        ends.append(np.asarray(trained(step, w, opt_state, batches)[0]))
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def run():
    """A task, its step, and parameters, state and metrics after 12 steps, 4 of them warm-up."""
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, warmup=4, variance_refreshes=None, axis_name=SLOW)
    params, opt_state, step = task.begin_own(tx, max_grad_norm=1.0)
    return task, step, *trained(step, params, opt_state, [task.batch(0)] * 12)


def test_phases_are_programs_and_bits_alone_cross_the_slow_axis(run):
    task, step, params, opt_state, found = run
    lowered = step.lower(params, opt_state, task.batch(0), phase="compression")
    slow = collections.Counter()
    for x in wire.collectives(lowered.compile(), task.mesh):
        if SLOW in x.axis:
            slow[x.dtype] += x.operand_bytes
    # What else crosses are numbers: norms, metrics, whether the step is fit.
    assert 2448 / task.places / 8 <= slow.pop("u8") <= 400
    assert sum(slow.values()) < 200
    phases = [PHASES[int(x["phase"])] for x in found]
    assert phases == ["warmup"] * 4 + ["compression"] * 8
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(params)))
    assert {name: x.sharding.spec for name, x in params.items()} == task.specs
    meshes.assert_places_agree(params)


def test_all_devices_skip_a_step_for_one_worker(run):
    task, step, *state, _ = run
    before = jax.device_get(state)
    batch = task.batch(3)
    x = np.array(batch["x"])
    x[40, 2] = np.nan
    batch["x"] = jax.device_put(x, batch["x"].sharding)
    # A step takes the arrays that it is given.
    *state, metrics = step(*jax.tree.map(jnp.copy, state), batch)
    assert (int(metrics["skipped"]), int(step.skips.worker)) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))


def test_no_worker_reads_parameters_of_another():
    """Of an embedding that is also the output layer, XLA would move parts about."""

    def tied(params, tokens):
        logits = params["embedding"][tokens] @ params["embedding"].T
        return jnp.mean((logits - jnp.eye(32)[tokens]) ** 2)

    tx = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW)
    mesh, spec = (
        make_mesh((2, 2, 2), (SLOW, "fsdp", "tensor"), AxisType.Auto),
        P(("fsdp", "tensor")),
    )
    options: Any = {"axis_name": SLOW, "param_specs": spec}
    drawn = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    params: Any = {"embedding": jax.device_put(drawn, NamedSharding(mesh, spec))}
    opt_state = onebit_jax.init(tx, params, mesh, **options)
    step = onebit_jax.train_step(tied, tx, mesh, **options)
    batch = np.random.default_rng(0).integers(0, 32, 64)
    batch = jax.device_put(batch, NamedSharding(mesh, P((SLOW, "fsdp"))))
    lowered = step.lower(params, opt_state, batch, phase="compression")
    sent = [x for x in wire.collectives(lowered.compile(), mesh) if SLOW in x.axis]
    assert {x.dtype for x in sent if x.operand_bytes > 64} == {"u8"}


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        ({"param_specs": P("fsdp")}, "without axis_name"),
        ({"axis_name": "slices", "param_specs": P()}, "'slices', but the mesh has the axes"),
        ({"axis_name": SLOW}, "are not all Explicit"),
        ({"axis_name": SLOW, "param_specs": P(SLOW)}, "which names 'data'"),
        ({"axis_name": SLOW, "param_specs": P("model")}, "which names 'model'"),
        ({"axis_name": SLOW, "param_specs": P(("fsdp", "tensor"))}, "dimension size is 6"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(split, complaint):
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, axis_name=SLOW)
    with pytest.raises(ValueError, match=complaint):
        onebit_jax.init(tx, {"w": np.zeros((6, 4), np.float32)}, task.mesh, **split)


def test_a_state_of_another_mesh_or_of_other_specs_is_refused():
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, axis_name=SLOW)
    params, opt_state, step = task.begin_own(tx)
    other = lambda p: {**task.specs, "up": P()}  # noqa: E731
    unsplit = onebit_jax.train_step(task.loss, tx, task.mesh, axis_name=SLOW, param_specs=other)
    whole = params | {"up": jax.device_put(params["up"], NamedSharding(task.mesh, P()))}
    with pytest.raises(ValueError, match="opt_state"):
        unsplit(whole, opt_state, task.batch(0))
    elsewhere = meshes.task("four workers", "Auto")
    of_four = onebit_jax.init(
        tx, elsewhere.params(), elsewhere.mesh, axis_name=SLOW, param_specs=elsewhere.specs
    )
    with pytest.raises(
        ValueError, match=r"for these parameters and 2 workers: opt_state.*expected"
    ):
        step(params, of_four, task.batch(0))


@pytest.mark.slow
def test_workers_along_a_pair_of_axes_draw_from_keys_of_their_own():
    axes, pair = {"node": 2, "local": 2, "fsdp": 2}, ("node", "local")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)
    split: Any = {"axis_name": pair, "param_specs": {"w": P("fsdp", None)}}
    tx = onebit_jax.onebit_adam(1e-2, warmup=2, variance_refreshes=None, axis_name=pair)

    def loss_fn(params, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        loss = ((batch["x"] @ params["w"] - 1) ** 2).mean() + 0.1 * (noise @ params["w"]).mean()
        return loss, {"drawn": noise.mean()}

    w = jax.device_put(np.zeros((64, 32), np.float32), NamedSharding(mesh, P("fsdp", None)))
    params = {"w": w}
    opt_state = onebit_jax.init(tx, params, mesh, **split)
    step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
    rows = NamedSharding(mesh, P((*pair, "fsdp")))
    x = np.random.default_rng(0).standard_normal((32, 64), np.float32)
    batch = {"x": jax.device_put(x, rows)}
    lowered = step.lower(params, opt_state, batch, phase="compression", rng=jax.random.key(0))
    found = wire.collectives(lowered.compile(), mesh)
    # Floats of more than a few metrics stay within a node.
    assert {x.dtype for x in found if "node" in x.axis and x.operand_bytes > 64} == {"u8"}
    losses = []
    for i in range(12):
        key = jax.random.fold_in(jax.random.key(1), i)
        params, opt_state, metrics = step(params, opt_state, batch, rng=key)
        own = [jax.random.normal(jax.random.fold_in(key, worker), (8, 64)) for worker in range(4)]
        np.testing.assert_allclose(metrics["drawn"], np.mean(own), atol=1e-6)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    onebit_jax.diagnose(params, opt_state, mesh, axis_name=pair)


# A model's state.

AVERAGING = optax.chain(onebit_jax.mean_gradients(SLOW), optax.sgd(1e-2))


@BOTH
def test_a_models_floats_are_averaged_and_kept_where_a_step_is_skipped(kind):
    task = meshes.task("model", kind)

    def loss_fn(params, batch, model_state):
        mean = 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(0)
        drawn = jax.random.uniform(model_state["key"])
        new = model_state | {"mean": mean, "count": model_state["count"] + 1}
        return task.loss(params, batch), {"drawn": drawn}, new

    model_state: Any = {
        "mean": np.zeros(16, np.float32),
        "count": np.int32(0),
        "key": jax.random.key(3),
    }
    with jax.set_mesh(task.mesh):
        params, opt_state, step = task.begin_own(AVERAGING, loss_fn)
        expected = np.zeros(16, np.float32)
        for i in range(3):
            batch = task.batch(i)
            if i == 2:
                x = np.array(batch["x"])
                x[40] = np.nan
                batch["x"] = jax.device_put(x, batch["x"].sharding)
            else:
                expected = 0.5 * expected + 0.5 * np.asarray(batch["x"]).mean(0)
            params, opt_state, model_state, metrics = step(
                params, opt_state, batch, model_state=model_state
            )
    assert int(metrics["skipped"]) == 1
    np.testing.assert_allclose(model_state["mean"], expected, rtol=1e-5, atol=1e-6)
    assert int(model_state["count"]) == 2
    assert jax.random.key_data(model_state["key"]).tolist() == [0, 3]
    assert model_state["mean"].sharding.is_fully_replicated
    drawn = [jax.random.uniform(jax.random.fold_in(jax.random.key(3), i)) for i in range(2)]
    np.testing.assert_allclose(metrics["drawn"], np.mean(drawn), rtol=1e-6)
    onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW, model_state=model_state)


def test_whole_numbers_that_differ_between_workers_are_refused():
    task = meshes.task("model", "Auto")

    def loss_fn(params, batch, model_state):
        positive = (batch["x"] > 0).sum(dtype=jnp.int32)
        return task.loss(params, batch), {}, {"positive": model_state["positive"] + positive}

    params, opt_state, step = task.begin_own(AVERAGING, loss_fn)
    with pytest.raises(ValueError, match="vmap"):
        step(params, opt_state, task.batch(0), model_state={"positive": np.int32(0)})
