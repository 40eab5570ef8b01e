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
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.collectives import alike, layout
from onebit_jax.programs import hlo
from onebit_jax.transforms.phases import PHASES
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import make_mesh


def trained(task, params, opt_state, step, steps):
    found = []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, task.batch(0))
        found.append(jax.device_get(metrics))
    return params, opt_state, found


def on_whole_model(tx, steps, **options):
    """The same on two workers that have all of the model each."""
    mesh = jax.make_mesh((2,), (SLOW,), devices=jax.devices()[:2])
    task = meshes.task("fsdp, tensor", "Auto")
    put = lambda tree, spec: jax.device_put(jax.device_get(tree), NamedSharding(mesh, spec))  # noqa: E731
    params = put(task.params(), P())
    opt_state = onebit_jax.init(tx, params, mesh)
    small = meshes.Task(mesh, dict.fromkeys(params, P()), ())
    step = onebit_jax.train_step(small.loss, tx, mesh, **options)
    found = []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, put(task.batch(0), P(SLOW)))
        found.append(jax.device_get(metrics))
    return params, opt_state, found


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.5}, {"accumulation": 4}], ids=str)
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_dense_steps_are_those_of_a_whole_model(kind, options):
    tx = optax.chain(onebit_jax.mean_gradients(SLOW), optax.adamw(1e-2))
    task = meshes.task("fsdp, tensor", kind)
    params, _, found = trained(task, *task.begin_own(tx, **options), 6)
    expected, _, wanted = on_whole_model(tx, 6, **options)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        jax.device_get(params),
        jax.device_get(expected),
    )
    for got, want in zip(found, wanted, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4)


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
        for i in range(4):
            x = np.random.default_rng(i).standard_normal((16, 16), np.float32)
            x = jax.device_put(x, NamedSharding(mesh, P(SLOW)))
            w, opt_state, metrics = step(w, opt_state, x)
            metrics["loss"].block_until_ready()
        ends.append(np.asarray(w))
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_a_step_is_lowered_before_it_is_called_for_one_phase_or_all(kind):
    task = meshes.task("model", kind)
    tx = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW)
    params, opt_state, step = task.begin_own(tx)
    lowered = {
        phase: step.lower(params, opt_state, task.batch(0), phase=phase).as_text()
        for phase in ("warmup", "compression", None)
    }
    # The program of all phases has a loop of zero or one iterations for each.
    assert lowered[None].count("stablehlo.while") > lowered["warmup"].count("stablehlo.while")
    assert "all_gather" in lowered["compression"]


@pytest.fixture(scope="module")
def run():
    """A task, its step, and parameters, state and metrics after 12 steps, 4 of them warm-up."""
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, warmup=4, variance_refreshes=None, axis_name=SLOW)
    params, opt_state, step = task.begin_own(tx, max_grad_norm=1.0)
    return task, step, *trained(task, params, opt_state, step, 12)


def test_phases_are_programs_and_bits_alone_cross_the_slow_axis(run):
    task, step, params, opt_state, found = run
    lowered = step.lower(params, opt_state, task.batch(0), phase="compression")
    slow = collections.Counter()
    for x in wire.collectives(lowered.compile(), task.mesh):
        if SLOW in x.axis:
            slow[x.dtype] += x.operand_bytes
    # Floats are the norms of the workers' gradients, and the metrics.
    assert slow.keys() == {"u8", "f32"}
    assert slow["f32"] < 100
    phases = [PHASES[int(x["phase"])] for x in found]
    assert phases[:4] == ["warmup"] * 4
    assert phases[4:] == ["compression"] * 8
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(params)))
    assert {name: x.sharding.spec for name, x in params.items()} == task.specs
    meshes.assert_places_agree(params)


def tied(params, tokens):
    """An embedding that is also the output layer, for which XLA moves parts of it about."""
    logits = params["embedding"][tokens] @ params["embedding"].T
    return jnp.mean((logits - jnp.eye(32)[tokens]) ** 2)


def on_tied(tx, fast):
    """The losses of five steps, and what a step of the last phase sends over the slow axis."""
    names = (SLOW, *fast)
    mesh = make_mesh((2,) * len(names), names, AxisType.Auto)
    spec = P(fast) if fast else P()
    options: Any = {"axis_name": SLOW, "param_specs": spec} if fast else {}
    drawn = np.random.default_rng(0).standard_normal((32, 16), np.float32)
    params: Any = {"embedding": jax.device_put(drawn, NamedSharding(mesh, spec))}
    opt_state = onebit_jax.init(tx, params, mesh, **options)
    step, losses = onebit_jax.train_step(tied, tx, mesh, **options), []
    place = NamedSharding(mesh, P(names[:2]))
    for i in range(5):
        batch = jax.device_put(np.random.default_rng(i).integers(0, 32, 64), place)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    lowered = step.lower(params, opt_state, batch, phase=PHASES[int(metrics["phase"])])
    sent = [x for x in wire.collectives(lowered.compile(), mesh) if SLOW in x.axis]
    return losses, {x.dtype for x in sent if x.operand_bytes > 64}


@pytest.mark.parametrize(
    ("tx", "dtypes"),
    [
        (onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW), {"u8"}),
        pytest.param(
            onebit_jax.zero_one_adam(
                1e-2, axis_name=SLOW, variance_freeze=1, sync_steps=lambda t: t % 8 == 7
            ),
            set(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["onebit_adam", "zero_one_adam between syncs"],
)
def test_no_worker_reads_parameters_of_another(tx, dtypes):
    losses, sent = on_tied(tx, ("fsdp", "tensor"))
    expected, _ = on_tied(tx, ())
    # A shard has a scale of its own.
    np.testing.assert_allclose(losses, expected, rtol=5e-3)
    assert sent == dtypes


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


def test_new_residuals_are_written_beside_the_old_and_gradients_are_transposed_once(monkeypatch):
    """For both the check and the update; a step that is left out copies residuals."""
    side, layers = 256, 3
    for module in (layout, alike):  # as if each were large: small tensors travel together
        monkeypatch.setattr(module, "SMALL", 32)
    mesh = jax.make_mesh((2, 2), (SLOW, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    names = [f"kernel{i}" for i in range(layers)]
    params: Any = {name: jax.ShapeDtypeStruct((side, side), jnp.float32) for name in names}
    split = {"axis_name": SLOW, "param_specs": P("fsdp", None)}

    def loss_fn(params, x):
        for name in names:
            x = jnp.tanh(x @ params[name])
        return jnp.mean(x**2)

    tx = onebit_jax.onebit_adam(1e-2, warmup=2, variance_refreshes=None, axis_name=SLOW)
    opt_state = jax.eval_shape(lambda x: onebit_jax.init(tx, x, mesh, **split), params)
    step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
    batch = jax.ShapeDtypeStruct((8, side), jnp.float32)
    compiled = step.lower(params, opt_state, batch, phase="compression").compile()
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert sizes is not None
    shard = 4 * side**2 // 2
    beside = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    assert layers * shard <= beside <= 1.05 * layers * shard
    program = hlo.Module(text)
    copies = {
        name: sum(x.op == "copy" and f"{side // 2},{side}]" in x.type for x in body.values())
        for name, body in program.computations.items()
    }
    loops = [x for x in program.computations[program.entry].values() if x.op == "while"]
    in_loops = sum(copies[body] for loop in loops for body in loop.callees("body"))
    assert in_loops == layers
    assert sum(copies.values()) - in_loops == layers


@pytest.mark.parametrize(
    ("split", "complaint"),
    [
        ({"param_specs": P("fsdp")}, "without axis_name"),
        ({"axis_name": "slices", "param_specs": P()}, "names 'slices', but the mesh has the axes"),
        ({"axis_name": SLOW}, "are not all Explicit"),
        ({"axis_name": SLOW, "param_specs": P(SLOW)}, "is split over 'data'"),
        ({"axis_name": SLOW, "param_specs": P("model")}, "name one of these"),
        ({"axis_name": SLOW, "param_specs": P(("fsdp", "tensor"))}, "splits an axis of 6 into 4"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(split, complaint):
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, axis_name=SLOW)
    with pytest.raises(ValueError, match=complaint):
        onebit_jax.init(tx, {"w": np.zeros((6, 4), np.float32)}, task.mesh, **split)


def test_a_state_of_other_specs_is_refused():
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, axis_name=SLOW)
    params, opt_state, _ = task.begin_own(tx)
    step = onebit_jax.train_step(
        task.loss, tx, task.mesh, axis_name=SLOW, param_specs=lambda p: {**task.specs, "up": P()}
    )
    params["up"] = jax.device_put(params["up"], NamedSharding(task.mesh, P()))
    with pytest.raises(ValueError, match=r"call onebit_jax\.init again"):
        step(params, opt_state, task.batch(0))


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW)
    params, opt_state, step = task.begin_own(tx)
    with Checkpoints(tmp_path) as checkpoints:
        for i in range(8):
            params, opt_state, _ = step(params, opt_state, task.batch(i))
            if i == 4:
                checkpoints.save(5, params, opt_state)
    fresh, state, step = task.begin_own(tx)
    with Checkpoints(tmp_path) as checkpoints:
        done, restored, state, *_ = checkpoints.restore(fresh, state)
    for i in range(done, 8):
        restored, state, _ = step(restored, state, task.batch(i))
    assert done == 5
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((params, opt_state)),
        jax.device_get((restored, state)),
    )


@pytest.mark.slow
def test_workers_along_a_pair_of_axes_draw_from_keys_of_their_own():
    axes, pair = {"node": 2, "local": 2, "fsdp": 2}, ("node", "local")
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)
    split = {"axis_name": pair, "param_specs": {"w": P("fsdp", None)}}
    tx = onebit_jax.onebit_adam(1e-2, warmup=2, variance_refreshes=None, axis_name=pair)

    def loss_fn(params, batch, rng):
        noise = jax.random.normal(rng, batch["x"].shape)
        loss = ((batch["x"] @ params["w"] - 1) ** 2).mean() + 0.1 * (noise @ params["w"]).mean()
        return loss, {"drawn": noise.mean()}

    w = jax.device_put(np.zeros((64, 32), np.float32), NamedSharding(mesh, P("fsdp", None)))
    params = {"w": w}
    opt_state = onebit_jax.init(tx, params, mesh, **split)
    step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
    rng = np.random.default_rng(0)
    rows = NamedSharding(mesh, P((*pair, "fsdp")))
    batch = {"x": jax.device_put(rng.standard_normal((32, 64), np.float32), rows)}
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


def tracking(task):
    """The task's loss, with a running mean of its inputs and a count, as of batch statistics."""

    def loss_fn(params, batch, model_state):
        mean = 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(0)
        drawn = jax.random.uniform(model_state["key"])
        new = model_state | {"mean": mean, "count": model_state["count"] + 1}
        return task.loss(params, batch), {"drawn": drawn}, new

    return loss_fn


def initial():
    return {"mean": np.zeros(16, np.float32), "count": np.int32(0), "key": jax.random.key(3)}


AVERAGING = optax.chain(onebit_jax.mean_gradients(SLOW), optax.sgd(1e-2))


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_floats_are_averaged_over_the_workers_and_all_devices_have_the_same(kind):
    task = meshes.task("model", kind)
    with jax.set_mesh(task.mesh):
        params, opt_state, step = task.begin_own(AVERAGING, tracking(task))
        model_state, expected = initial(), np.zeros(16, np.float32)
        for i in range(3):
            batch = task.batch(i)
            params, opt_state, model_state, metrics = step(
                params, opt_state, batch, model_state=model_state
            )
            expected = 0.5 * expected + 0.5 * np.asarray(batch["x"]).mean(0)
    np.testing.assert_allclose(model_state["mean"], expected, rtol=1e-5, atol=1e-6)
    assert int(model_state["count"]) == 3
    assert jax.random.key_data(model_state["key"]).tolist() == [0, 3]
    assert model_state["mean"].sharding.is_fully_replicated
    drawn = [jax.random.uniform(jax.random.fold_in(jax.random.key(3), i)) for i in range(2)]
    np.testing.assert_allclose(metrics["drawn"], np.mean(drawn), rtol=1e-6)
    onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW, model_state=model_state)


def test_it_is_kept_where_a_step_is_skipped():
    task = meshes.task("model", "Auto")
    params, opt_state, step = task.begin_own(AVERAGING, tracking(task))
    batch = task.batch(0)
    x = np.array(batch["x"])
    x[40] = np.nan
    batch["x"] = jax.device_put(x, NamedSharding(task.mesh, P(SLOW, None)))
    *_, model_state, metrics = step(params, opt_state, batch, model_state=initial())
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(model_state["mean"], np.zeros(16))
    assert int(model_state["count"]) == 0


def test_whole_numbers_that_differ_between_workers_are_refused():
    task = meshes.task("model", "Auto")

    def loss_fn(params, batch, model_state):
        positive = (batch["x"] > 0).sum(dtype=jnp.int32)
        return task.loss(params, batch), {}, {"positive": model_state["positive"] + positive}

    params, opt_state, step = task.begin_own(AVERAGING, loss_fn)
    with pytest.raises(ValueError, match=r"no float would differ between workers .*\['positive'\]"):
        step(params, opt_state, task.batch(0), model_state={"positive": np.int32(0)})
