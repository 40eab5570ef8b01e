from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding, wire
from onebit_jax.collectives.layout import tensor_id
from tests.sharded import meshes
from tests.sharded.meshes import CASES, SLOW
from tests.workers import make_mesh, onebit_state

QUICK = [("fsdp, tensor", "Explicit")]
PARAMETRIZED = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize(("mesh", "kind"), PARAMETRIZED)
def test_bits_alone_cross_the_slow_axis_and_replicas_agree(mesh, kind):
    task = meshes.task(mesh, kind)
    one_bit = task.on_mesh(onebit_jax.onebit_adam(1e-2, warmup=4, axis_name=SLOW))
    with jax.set_mesh(task.mesh):
        state, step = task.begin(one_bit)
        added = task.sent(step) - task.sent_alone(optax.adamw(1e-2))
        (params, opt_state), losses = task.trained(state, step, 12)
    assert {dtype for _, dtype, axis, size in added if axis == SLOW and size > 16} == {"u8"}
    # Along the fast axes only numbers of tensors: norms of the variance, whether a step is fit.
    assert all(size <= 8 * len(task.specs) for *_, axis, size in added if axis != SLOW)
    assert losses[-1] < 0.8 * losses[0]
    meshes.assert_replicas_agree(params)
    progress = onebit_state(opt_state).progress
    assert np.asarray(progress.frozen_at).tolist() == [4] * task.workers


def device_bytes(tree):
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.device == x.addressable_shards[0].device
    )


def test_a_device_holds_its_part_of_the_state():
    held = {}
    for kind, axes in {"whole": (2, 1), "halves": (2, 2), "quarters": (2, 4)}.items():
        mesh = make_mesh(axes, (SLOW, "fsdp"), AxisType.Auto)
        tx: Any = sharding.on_mesh(
            onebit_jax.onebit_adam(1e-2, axis_name=SLOW), mesh, axis_name=SLOW, specs=P("fsdp")
        )
        params = {name: np.zeros((512, 512), np.float32) for name in "abc"}
        held[kind] = device_bytes(sharding.worker_copies(tx.init(params), mesh, axis_name=SLOW))
    assert held["halves"] / held["whole"] == pytest.approx(1 / 2, rel=2e-3)
    assert held["quarters"] / held["whole"] == pytest.approx(1 / 4, rel=2e-3)


def test_shards_decide_alike_when_warmup_ends():
    task = meshes.task("fsdp, tensor", "Auto")
    rule = onebit_jax.variance_stable(0.3)
    tx = task.on_mesh(onebit_jax.onebit_adam(1e-3, b2=0.9, warmup=rule, axis_name=SLOW))
    state, step = task.begin(tx)
    for i in range(30):
        state, metrics = step(state, task.batch(i))
        metrics["loss"].block_until_ready()
    params, opt_state = state
    own = onebit_state(opt_state)
    assert 4 <= np.asarray(own.progress.frozen_at)[0] < 30
    meshes.assert_replicas_agree(
        (params, own.progress._replace(upcoming=()), own.variance_record.growth)
    )
    # Each shard has its own copy of these, and all are the same.
    norms = np.asarray(own.variance_record.norms)
    np.testing.assert_array_equal(norms, np.broadcast_to(norms[:1, :1], norms.shape))


@pytest.mark.slow
def test_all_devices_skip_a_step_for_one_shard():
    task = meshes.task("fsdp, tensor", "Auto")
    inner = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW)
    tx = task.on_mesh(onebit_jax.skip_nonfinite(inner, SLOW))
    params = task.params()
    state = sharding.worker_copies((params, tx.init(params)), task.mesh, axis_name=SLOW)

    def on_gradients(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(jax.vmap(on_gradients, spmd_axis_name=SLOW))
    grads = {name: np.ones((2, *x.shape), np.float32) for name, x in params.items()}
    grads["up"][1, 3, 5] = np.nan
    before = jax.device_get(state)
    after = jax.device_get(step(state, task.put(grads, SLOW)))
    np.testing.assert_array_equal(after[1].skips.in_a_row, [1, 1])
    np.testing.assert_array_equal(after[1].skips.worker, [1, 1])
    assert after[1].skips.tensor[0] == tensor_id("['up']")
    jax.tree.map(
        np.testing.assert_array_equal,
        (before[0], before[1].inner_state),
        (after[0], after[1].inner_state),
    )


@pytest.mark.slow
def test_inside_and_around_other_transformations():
    """Two kinds of parameters, a learning rate in the state, and one that follows losses."""
    task = meshes.task("fsdp, tensor", "Auto")
    adam = optax.inject_hyperparams(onebit_jax.onebit_adam, static_args=("warmup", "axis_name"))
    parts: dict[Any, Any] = {
        "matrices": adam(1e-2, warmup=3, axis_name=SLOW),
        "vectors": onebit_jax.signum(1e-3, axis_name=SLOW),
    }
    labels = lambda p: jax.tree.map(lambda x: ["", "vectors", "matrices"][x.ndim], p)  # noqa: E731
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=2)
    tx = task.on_mesh(optax.chain(optax.partition(parts, labels), plateau))
    params = task.params()
    state = sharding.worker_copies((params, tx.init(params)), task.mesh, axis_name=SLOW)

    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    step = jax.jit(sharding.worker_step(train_step, task.mesh, axis_name=SLOW))
    losses = []
    for i in range(12):
        # After a while every batch is the same, and the loss of each worker on a plateau.
        state, metrics = step(state, task.batch(min(i, 3)))
        losses.append(float(metrics["loss"]))
    params, opt_state = state
    meshes.assert_replicas_agree(params)
    own = onebit_state(opt_state)
    split = {name: task.specs[name] for name in ("up", "down", "square")}
    for name, spec in split.items():
        x = own.v_then_inverse_root[name]
        assert x.sharding.is_equivalent_to(NamedSharding(task.mesh, P(SLOW, *spec)), x.ndim)
    scales = np.asarray(opt_state[1].scale)
    assert scales[0] == scales[1]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("fast", ["Auto", "Explicit"])
def test_a_batch_from_the_host_is_dealt_out_on_explicit_axes(fast):
    types = (meshes.TYPES["Explicit"], meshes.TYPES[fast])
    mesh = jax.make_mesh((2, 2), (SLOW, "model"), devices=jax.devices()[:4], axis_types=types)

    def train_step(state, x):
        return state, {"mean": x.mean()}

    with jax.set_mesh(mesh):
        state = sharding.worker_copies(np.zeros(2, np.float32), mesh, axis_name=SLOW)
        step = jax.jit(sharding.worker_step(train_step, mesh, axis_name=SLOW))
        x = np.arange(24, dtype=np.float32).reshape(8, 3)
        placed = jax.device_put(x, NamedSharding(mesh, P(SLOW)))
        means = [float(step(state, batch)[1]["mean"]) for batch in (x, placed)]
    assert means == [11.5, 11.5]


# Flax's containers, whose training steps know nothing of workers.


@pytest.fixture(scope="module")
def task():
    return meshes.task("model", "Auto")


def split(path, x):
    """Kernels by their outputs."""
    return P(None, "model") if x.ndim == 2 else P("model")


def optimizer(task) -> Any:
    tx = onebit_jax.onebit_adam(1e-2, warmup=5, axis_name=SLOW)
    specs = lambda params: jax.tree_util.tree_map_with_path(split, params)  # noqa: E731
    return sharding.on_mesh(tx, task.mesh, axis_name=SLOW, specs=specs)


def train(task, train_step, state, steps=20):
    state = sharding.worker_copies(state, task.mesh, axis_name=SLOW)
    step = jax.jit(sharding.worker_step(train_step, task.mesh, axis_name=SLOW))
    program = step.lower(state, task.batch(0)).compile()
    losses = []
    for _ in range(steps):
        state, metrics = step(state, task.batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    return state, wire.collectives(program, task.mesh)


def assert_clean(found):
    assert {x.dtype for x in found if x.axis == SLOW and x.operand_bytes > 4} == {"u8"}
    assert not [x for x in found if x.axis == "model" and x.dtype == "u8"]


@pytest.mark.slow
def test_a_train_state_of_flax_linen(task):
    net = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(16)])
    params = net.init(jax.random.key(0), np.zeros((1, 16), np.float32))
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optimizer(task))

    def train_step(state, batch):
        def loss_fn(params):
            return optax.l2_loss(state.apply_fn(params, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state, found = train(task, train_step, state)
    assert_clean(found)
    assert np.asarray(state.step).tolist() == [20, 20]
    meshes.assert_replicas_agree(state.params)


@pytest.mark.slow
def test_an_optimizer_of_flax_nnx(task):
    model = nnx.Sequential(
        nnx.Linear(16, 64, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(64, 16, rngs=nnx.Rngs(1))
    )
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer(task), wrt=nnx.Param)))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            return optax.l2_loss(model(batch["x"]), batch["y"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    # What is not like a parameter says how it is split, for those that place by it.
    stated = [
        x.get_metadata().get("out_sharding")
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if isinstance(x, nnx.Variable)
    ]
    assert P("model", None, None) in stated
    state, found = train(task, train_step, state)
    assert_clean(found)
    params = nnx.filter_state(state, nnx.Param)
    meshes.assert_replicas_agree(params)
