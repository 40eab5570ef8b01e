"""Parameters of every dtype, none, empty and very large, through a step of every optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms.phases import PHASES
from tests.small_task import MESH, WORKERS, onebit, start

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


def squares(params, batch):
    """Far from the mean of a worker's share, in every element."""
    target = jnp.mean(batch)
    away = [jnp.sum((x.astype(jnp.float32) - target) ** 2) for x in jax.tree.leaves(params)]
    return sum(away, start=jnp.float32(0))


def batches(count):
    return np.random.default_rng(0).normal(3, 1, (count, 4 * WORKERS)).astype(np.float32)


def assert_replicas_agree(params, opt_state):
    shared = jax.tree.map(
        lambda node: None if is_per_worker(node) else node, opt_state, is_leaf=is_per_worker
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, shared)):
        first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
        assert others == [first] * (WORKERS - 1), jax.tree_util.keystr(path)


def assert_trains(name, params, batches, loss_fn=squares, **options):
    """Into the compressed phase: the loss falls, dtypes stay, replicas agree; returns the end."""
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    step, (params, opt_state) = start(OPTIMIZERS[name], params=params, loss_fn=loss_fn, **options)
    losses, phases = [], []
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
        phases.append(PHASES[int(metrics["phase"])])
    if name in DENSE_FIRST:
        assert phases[0] == "warmup"
        assert set(phases[1:]) <= {"compression", "sync"}
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == kinds
    assert_replicas_agree(params, opt_state)
    return params


@of_every_optimizer
def test_a_tree_of_all_dtypes_at_once(name):
    """With leaves that are None, empty, and of one element."""
    with jax.enable_x64(True):
        params = {
            dtype: jnp.linspace(-1, 1, 24, dtype=dtype).reshape(8, 3)
            for dtype in ("float16", "bfloat16", "float32", "float64")
        }
        params |= {"none": None, "empty": jnp.zeros((0,)), "list": [jnp.float32(1), None]}
        after = assert_trains(name, params, batches(4))
        for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
            assert not x.size or np.any(np.asarray(x) != np.asarray(y))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_model_of_one_dtype(dtype):
    """With gradients, and a loss, of it, which microbatches add up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"kernel": jnp.ones((9, 5), dtype), "bias": jnp.ones(5, dtype)}

        def loss_fn(params, batch):
            x = jnp.sum(params["kernel"] ** 2) + jnp.sum(params["bias"])
            return jnp.mean(jnp.tanh(x / 50) * batch.astype(dtype))

        assert_trains("onebit_adam", params, batches(4), loss_fn, accumulation=2)


def test_a_tree_of_nothing_to_train():
    """Every leaf None or empty: what a partition may leave to one of its branches."""
    tree = {"none": None, "empty": jnp.zeros((0,)), "rows": jnp.zeros((0, 3))}
    for tx in OPTIMIZERS.values():
        assert jax.tree.leaves(onebit_jax.init(tx, {"none": None}, MESH)) is not None
        shapes = jax.eval_shape(lambda x: x, onebit_jax.init(tx, tree, MESH))
        assert all(x.size < 100 for x in jax.tree.leaves(shapes))


@of_every_optimizer
def test_an_embedding_of_a_million_rows(name):
    """Of which a batch sees a few: the others have gradients of 0."""
    rows = 1_000_000
    embedding = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 4), np.float32))
    ids = np.random.default_rng(1).integers(0, rows, 16 * WORKERS)

    def loss_fn(params, batch):
        return jnp.mean((params["embedding"][batch] - 1) ** 2)

    assert_trains(name, {"embedding": embedding}, [ids, ids, ids], loss_fn)


# Integers


INTEGERS = {"kernel": jnp.ones((8, 3)), "table": jnp.arange(5)}


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

    params = jax.device_put(INTEGERS, jax.NamedSharding(MESH, P()))
    for batch in batches(4):
        params, opt_state = step(
            params, opt_state, jax.device_put(batch, jax.NamedSharding(MESH, P("data")))
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
    params = INTEGERS | {"table": INTEGERS["table"].astype(jnp.float32)}
    step, state = start(tx, params=params, loss_fn=squares)
    for batch in batches(4):
        *state, metrics = step(*state, batch)
        assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state[0]["table"], INTEGERS["table"])
    assert np.all(np.asarray(state[0]["kernel"]) > 1)


def test_integers_beside_the_parameters():
    """As a model's state, in `train_step`."""
    params, table = {"kernel": INTEGERS["kernel"]}, {"table": INTEGERS["table"]}

    def loss_fn(params, batch, model_state):
        return squares(params, batch) + jnp.sum(model_state["table"]), {}, model_state

    step, (params, opt_state) = start(onebit(), params=params, loss_fn=loss_fn)
    for batch in batches(4):
        params, opt_state, table, _ = step(params, opt_state, batch, model_state=table)
    np.testing.assert_array_equal(table["table"], INTEGERS["table"])
