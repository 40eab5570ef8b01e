"""Parameters of every dtype, none, empty and very large, through a step of every optimizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms.phases import PHASES
from tests.small_task import MESH, WORKERS, onebit, start

pytestmark = pytest.mark.usefixtures("quick_compilation")

LR = 1e-2
# Each goes on from dense updates, if it has any, to compressed ones with its second update.
OPTIMIZERS = {
    "onebit_adam": onebit_jax.onebit_adam(LR, warmup=1, axis_name="data"),
    "onebit_lamb": onebit_jax.onebit_lamb(LR, warmup=1, axis_name="data"),
    "birder": onebit_jax.birder(LR, seed=0, axis_name="data"),
    "zero_one_adam": onebit_jax.zero_one_adam(LR, variance_freeze=1, axis_name="data"),
    "ef_signsgd": onebit_jax.ef_signsgd(LR, axis_name="data"),
    "signum": onebit_jax.signum(LR, axis_name="data"),
    "distributed_lion": onebit_jax.distributed_lion(LR, axis_name="data"),
    "compressed_mean": optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(LR)),
}
DENSE_FIRST = {"onebit_adam", "onebit_lamb", "zero_one_adam"}
of_every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
of_some_and_slowly_of_others = pytest.mark.parametrize(
    "name",
    [
        name if name in ("onebit_adam", "signum") else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)


def squares(params, batch):
    """Far from the mean of a worker's share, in every element."""
    target = jnp.mean(batch)
    away = [jnp.sum((x.astype(jnp.float32) - target) ** 2) for x in jax.tree.leaves(params)]
    return sum(away, start=jnp.float32(0))


BATCH = np.random.default_rng(0).normal(3, 1, 4 * WORKERS).astype(np.float32)


def assert_replicas_agree(params, opt_state):
    shared = jax.tree.map(
        lambda node: None if is_per_worker(node) else node, opt_state, is_leaf=is_per_worker
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, shared)):
        first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert others == [first] * (WORKERS - 1), jax.tree_util.keystr(path)


def trained(name, params, batch: Any = BATCH, loss_fn=squares, updates=4, **options):
    """Into the compressed phase: dtypes stay, replicas agree; returns losses and parameters."""
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    step, (params, opt_state) = start(OPTIMIZERS[name], params=params, loss_fn=loss_fn, **options)
    losses, phases = [], []
    for _ in range(updates):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
        phases.append(PHASES[int(metrics["phase"])])
    if name in DENSE_FIRST:
        assert phases[0] == "warmup"
        assert set(phases[1:]) <= {"compression", "sync"}
    assert np.all(np.isfinite(losses))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == kinds
    assert_replicas_agree(params, opt_state)
    return losses, params


@of_some_and_slowly_of_others
def test_a_tree_of_all_dtypes_at_once(name):
    """With leaves that are None, empty, and of one element."""
    with jax.enable_x64(True):
        params = {
            dtype: jnp.linspace(-1, 1, 24, dtype=dtype).reshape(8, 3)
            for dtype in ("float16", "bfloat16", "float32", "float64")
        }
        params |= {"none": None, "empty": jnp.zeros((0,)), "list": [jnp.float32(1), None]}
        before = jax.tree.map(np.array, params)
        losses, after = trained(name, params)
        assert losses[-1] < losses[0]
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            assert not x.size or np.any(np.asarray(x) != np.asarray(y))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_model_of_one_dtype(dtype):
    """With gradients, and a loss, of it, which microbatches add up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"kernel": jnp.ones((9, 5), dtype), "bias": jnp.ones(5, dtype)}

        def loss_fn(params, batch):
            x = jnp.sum(params["kernel"] ** 2) + jnp.sum(params["bias"])
            return jnp.mean(jnp.tanh(x / 50) * batch.astype(dtype))

        losses, _ = trained("onebit_adam", params, loss_fn=loss_fn, accumulation=2)
        assert losses[-1] < losses[0]


@of_some_and_slowly_of_others
def test_an_embedding_of_a_million_rows(name):
    """Of which a batch sees a few: all others have gradients of 0."""
    rows = 1_000_000
    embedding = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 4), np.float32))
    ids = np.random.default_rng(1).integers(0, rows, 16 * WORKERS)

    def loss_fn(params, batch):
        return jnp.mean((params["embedding"][batch] - 1) ** 2)

    trained(name, {"embedding": embedding}, ids, loss_fn, updates=2)


# Integers


INTEGERS = {"kernel": np.ones((8, 3), np.float32), "table": np.arange(5, dtype=np.int32)}


def kinds(params):
    return jax.tree.map(
        lambda x: "floats" if jnp.issubdtype(x.dtype, jnp.floating) else "integers", params
    )


@of_every_optimizer
def test_integers_are_named(name):
    with pytest.raises(ValueError, match=r"\['table'\] has dtype int32.*optax.partition"):
        onebit_jax.init(OPTIMIZERS[name], INTEGERS, MESH)


def test_integers_stay_in_a_loop_of_ones_own():
    """What the error advises: JAX's gradient of an integer is one without a value."""
    tx = optax.partition({"floats": onebit(), "integers": optax.set_to_zero()}, kinds)
    opt_state = onebit_jax.init(tx, INTEGERS, MESH)
    specs = onebit_jax.state_specs(opt_state, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def step(params, opt_state, batch):
        grads = jax.grad(squares, allow_int=True)(params, batch)
        grads = jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g, grads, params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(INTEGERS, NamedSharding(MESH, P()))
    for _ in range(4):
        params, opt_state = step(
            params, opt_state, jax.device_put(BATCH, NamedSharding(MESH, P("data")))
        )
    np.testing.assert_array_equal(params["table"], INTEGERS["table"])
    assert params["table"].dtype == INTEGERS["table"].dtype
    assert np.all(np.asarray(params["kernel"]) > 1)
    assert_replicas_agree(params, opt_state)


def test_integers_held_as_floats_stay():
    """The other advice, in `train_step`."""
    tx = optax.partition(
        {"kernel": onebit(), "table": optax.set_to_zero()}, {"kernel": "kernel", "table": "table"}
    )
    params = INTEGERS | {"table": INTEGERS["table"].astype(np.float32)}
    step, (params, opt_state) = start(tx, params=params, loss_fn=squares)
    for _ in range(4):
        params, opt_state, metrics = step(params, opt_state, BATCH)
        assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(params["table"], INTEGERS["table"])
    assert np.all(np.asarray(params["kernel"]) > 1)


def test_integers_beside_the_parameters():
    """As a model's state, in `train_step`."""
    params, table = {"kernel": INTEGERS["kernel"]}, {"table": INTEGERS["table"]}

    def loss_fn(params, batch, model_state):
        return squares(params, batch) + jnp.sum(model_state["table"]), {}, model_state

    step, (params, opt_state) = start(onebit(), params=params, loss_fn=loss_fn)
    for _ in range(4):
        params, opt_state, table, _ = step(params, opt_state, BATCH, model_state=table)
    np.testing.assert_array_equal(table["table"], INTEGERS["table"])
