"""Where `init` and `train_step` put parameters and state; a state that is not theirs is refused."""

import contextlib
import itertools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import onebit_jax
from onebit_jax.markers import is_per_worker
from tests.small_task import (
    MESH,
    NODES_MESH,
    WARMUP,
    WORKERS,
    abstract,
    assert_close,
    assert_equal,
    dense,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    onebit,
    onebit_start,
    replicated,
    start,
    train,
)
from tests.workers import PAIR

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = AxisType.Auto, AxisType.Explicit
[BATCH] = make_batches(1)


@pytest.mark.parametrize("nodes", [False, True], ids=["flat", "nodes"])
def test_state_is_sharded_or_replicated_as_its_marker_says(nodes):
    mesh, axes = (NODES_MESH, PAIR) if nodes else (MESH, "data")
    opt_state = onebit_jax.init(onebit(axes), make_params(), mesh)
    if not nodes:
        step, (params, _) = onebit_start()
        opt_state = train(step, params, opt_state, [BATCH])[1]
    specs = onebit_jax.state_specs(opt_state, axes)
    for node in jax.tree.leaves(specs, is_leaf=is_per_worker):
        assert {*jax.tree.leaves(node)} <= {P(axes) if is_per_worker(node) else P()}
    devices = mesh.devices.reshape(-1).tolist()

    def check(leaf, spec):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)
        for shard in leaf.addressable_shards:
            row = devices.index(shard.device)
            expected = jax.device_get(leaf)[row : row + 1] if spec else leaf
            np.testing.assert_array_equal(shard.data, expected)

    jax.tree.map(check, opt_state, specs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_step_runs_on_every_kind_of_mesh_whichever_is_set(kind):
    """State goes from one kind of mesh to the other; batches come from the host, or from a mesh."""
    tx, mesh, others = dense(), make_mesh(kind=kind), [make_mesh(kind=other) for other in KINDS]
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    expected = None
    for made_on, around in itertools.product(others, [None, *others]):
        with contextlib.nullcontext() if around is None else jax.set_mesh(around):
            params = jax.tree.map(jnp.asarray, make_params())
            opt_state = onebit_jax.init(tx, params, made_on)
            assert {x.sharding.mesh for x in jax.tree.leaves(opt_state)} == {made_on}
            state = train(step, params, opt_state, [BATCH])
            on_mesh = jax.device_put(BATCH, NamedSharding(made_on, P("data")))
            state = train(step, *state, [on_mesh])
        assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}
        expected = jax.device_get(state) if expected is None else expected
        assert_equal(state, expected)


def test_a_state_goes_from_a_loop_of_ones_own_into_the_step():
    """`train_step` goes on as the loop would."""
    tx, params, batches = onebit(), replicated(make_params()), make_batches(WARMUP + 2)
    opt_state = onebit_jax.init(tx, params, MESH)
    specs = onebit_jax.state_specs(opt_state, "data")

    def update(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    in_specs = P(), specs, P("data")
    loop = jax.jit(
        jax.shard_map(
            update, mesh=MESH, in_specs=in_specs, out_specs=(P(), specs, P()), check_vma=False
        )
    )
    batches = jax.device_put(batches, NamedSharding(MESH, P("data")))
    state = train(loop, params, opt_state, batches[:-1])
    expected = train(loop, *state, batches[-1:])
    step, _ = onebit_start()
    assert_close(train(step, *state, batches[-1:]), expected)


def test_parameters_and_state_are_donated_and_the_batch_is_not():
    """On CPUs the state stays: XLA would copy it."""
    step, state = onebit_start()
    batch = jax.device_put(BATCH, NamedSharding(MESH, P("data")))
    params, opt_state = train(step, *state, [batch])
    step(params, opt_state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


def test_a_step_is_compiled_once_and_its_state_traced_once(caplog):
    """A state with weak types, which no step returns, would have the second compiled anew."""
    traced = []

    def init(params):
        traced.append(params)
        return optax.EmptyState()

    counting = optax.GradientTransformation(init, optax.identity().update)
    scheduled = optax.inject_hyperparams(optax.adam)(1e-2)
    tx = optax.chain(onebit_jax.compressed_mean("data"), scheduled, counting)
    step, (params, opt_state) = start(tx, MESH)
    assert not any(x.weak_type for x in jax.tree.leaves(opt_state))
    with jax.log_compiles():
        counts = []
        for batch in make_batches(4):
            params, opt_state, _ = step(params, opt_state, batch)
            counts.append(len(traced))
    assert counts[1] == counts[3]
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 1


# A state that is not the step's own


@pytest.fixture(params=KINDS, ids=str)
def mesh(request):
    return make_mesh(kind=request.param)


@pytest.fixture
def other_kind(mesh):
    """The kind of the mesh that the state comes from."""
    [kind] = {*KINDS} - {*mesh.axis_types}
    return kind


def refused(mesh, opt_state, words, tx=None, params=None):
    """Refused in every call, and before anything is compiled or donated."""
    step = onebit_jax.train_step(loss_fn, onebit() if tx is None else tx, mesh)
    params = make_params() if params is None else params
    for _ in range(2):
        with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
            step(params, opt_state, BATCH)
    for leaf in jax.tree.leaves((params, opt_state)):
        assert not (isinstance(leaf, jax.Array) and leaf.is_deleted())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run where compression has begun, and how it goes on."""
    folder = tmp_path_factory.mktemp("saved") / "onebit"
    step, start = onebit_start()
    state = train(step, *start, make_batches(WARMUP + 2))
    ocp.save(folder, state)
    last = make_batches(WARMUP + 3)[-1:]
    return folder, jax.device_get(train(step, *state, last)), last


def restored_onto(mesh, folder) -> Any:
    params = replicated(make_params(), mesh)
    return ocp.load(folder, abstract((params, onebit_jax.init(onebit(), params, mesh))))


def test_restored_without_a_target(saved):
    """Orbax then gives dicts and lists for named tuples, and the marks are lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, opt_state = ocp.load(saved[0])
    words = r"^opt_state is not a state of this optimizer.*without its PerWorker nodes.*diverge"
    refused(MESH, opt_state, words)
    opt_state = onebit_jax.init(onebit(), make_params(), MESH)
    unmarked = jax.tree.map(
        lambda node: (node.value,) if is_per_worker(node) else node,
        opt_state,
        is_leaf=is_per_worker,
    )
    refused(MESH, unmarked, words)


def test_a_run_goes_on_from_another_kind_of_mesh_and_from_other_devices(mesh, other_kind, saved):
    folder, expected, batches = saved
    step = onebit_jax.train_step(loss_fn, onebit(), mesh)
    params, opt_state = restored_onto(make_mesh(kind=other_kind), folder)
    moved = train(step, params, opt_state, batches)
    # Of another compilation: XLA for CPUs (JAX 0.10.2) may contract other products in it.
    assert_close(moved, expected)
    moved = jax.device_get(moved)
    others = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[-WORKERS:])
    params, opt_state = jax.device_get(restored_onto(others, folder))
    assert_equal(train(step, params, opt_state, batches), moved)


@pytest.mark.parametrize(
    "tx",
    [dense(), onebit_jax.ef_signsgd(1e-2, axis_name="data"), optax.chain(onebit(), optax.ema(0.9))],
    ids=["dense", "ef_signsgd", "more of it"],
)
def test_of_another_optimizer(tx):
    opt_state = onebit_jax.init(tx, make_params(), MESH)
    refused(MESH, opt_state, r"^opt_state is not a state of this optimizer.* expected .*init")


def test_of_other_options_or_parameters():
    coarse = onebit(exchange=onebit_jax.ExchangeOptions(residual_dtype="bfloat16"))
    opt_state = onebit_jax.init(coarse, make_params(), MESH)
    refused(
        MESH, opt_state, r"compensated.*\(bfloat16\)\), expected .*'float32'.*onebit_jax.resize"
    )
    other = {"layer": {"kernel": np.ones((9, 6), np.float32), "bias": np.ones(6, np.float32)}}
    refused(MESH, onebit_jax.init(onebit(), other, MESH), r"\(\(6,\), .*expected \(\(5,\), ")
    renamed = {"head": make_params()["layer"]}
    opt_state = onebit_jax.init(onebit(), renamed, MESH)
    refused(MESH, opt_state, r"\['layer'\]\['bias'\] is None, expected")


def test_of_another_number_of_workers(mesh, other_kind):
    half = make_mesh((WORKERS // 2,), kind=other_kind)
    opt_state = onebit_jax.init(onebit(), make_params(), half)
    words = r"^opt_state is not a state of this optimizer|onebit_jax.resize takes it to another"
    refused(mesh, opt_state, words)
    refused(mesh, jax.device_get(opt_state), words)


def test_parameters_that_are_split_are_gathered(mesh):
    params = {"layer": {"kernel": np.ones((8, 5), np.float32), "bias": np.ones(5, np.float32)}}
    split = NamedSharding(mesh, P("data"))
    kernel = jax.device_put(params["layer"]["kernel"], split)
    apart = {"layer": params["layer"] | {"kernel": kernel}}
    loss = lambda p, x: jnp.mean((x["x"][:, :8] @ p["layer"]["kernel"] - x["y"]) ** 2)  # noqa: E731
    step = onebit_jax.train_step(loss, dense(), mesh)
    results = [train(step, x, onebit_jax.init(dense(), x, mesh), [BATCH]) for x in (params, apart)]
    assert_equal(results[1], results[0])
