"""A state that is not the step's own is refused in words, or put where it belongs."""

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
    WARMUP,
    WORKERS,
    assert_equal,
    dense,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    onebit,
    replicated,
    train,
)
from tests.workers import PAIR
from train.checkpoint import abstract

KINDS = AxisType.Auto, AxisType.Explicit


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
            step(params, opt_state, make_batches(1)[0])
    for leaf in jax.tree.leaves((params, opt_state)):
        assert not (isinstance(leaf, jax.Array) and leaf.is_deleted())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a run in the middle, one where compression has begun, and of a dense one."""
    folder = tmp_path_factory.mktemp("saved")
    step = onebit_jax.train_step(loss_fn, onebit(), MESH)
    start = make_params(), onebit_jax.init(onebit(), make_params(), MESH)
    state = train(step, *start, make_batches(WARMUP + 2))
    ocp.save(folder / "onebit", state)
    ocp.save(folder / "dense", onebit_jax.init(dense(), make_params(), MESH))
    last = make_batches(WARMUP + 3)[-1:]
    return folder, step, jax.device_get(train(step, *state, last)), last


def without_target(folder) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided")
        return ocp.load(folder)


# Checkpoints


def test_restored_without_a_target(saved):
    """Orbax then gives dicts and lists for named tuples, and the marks are lost."""
    _, opt_state = without_target(saved[0] / "onebit")
    assert isinstance(opt_state, list)
    refused(
        MESH,
        opt_state,
        r"^opt_state is not a state of this optimizer.* is missing.*restored without a target.*"
        r"lost its PerWorker nodes.*silently diverge.*target=onebit_jax.init\(tx, params, mesh\)",
    )


def test_a_dense_one_restored_without_a_target(saved):
    """It had no marks to lose."""
    with pytest.raises(ValueError, match="restored without a target") as error:
        onebit_jax.train_step(loss_fn, dense(), MESH)(
            make_params(), without_target(saved[0] / "dense"), make_batches(1)[0]
        )
    assert "PerWorker" not in str(error.value)


def test_restored_with_a_target_of_another_kind_of_mesh(mesh, other_kind, saved):
    """The advice: a run restored onto either kind of mesh goes on as it would have."""
    folder, _, expected, batches = saved
    params, opt_state = restored_onto(make_mesh(kind=other_kind), folder)
    step = onebit_jax.train_step(loss_fn, onebit(), mesh)
    assert_equal(train(step, params, opt_state, batches), expected)


def restored_onto(mesh, folder) -> Any:
    params = replicated(make_params(), mesh)
    target = params, onebit_jax.init(onebit(), params, mesh)
    return ocp.load(folder / "onebit", abstract(target))


# Another's state


def test_that_lost_its_marks_alone():
    opt_state: Any = onebit_jax.init(onebit(), make_params(), MESH)
    unmarked = jax.tree.map(
        lambda node: (node.value,) if is_per_worker(node) else node,
        opt_state,
        is_leaf=is_per_worker,
    )
    refused(MESH, unmarked, r"value.* is missing.*lost its PerWorker nodes.*beside nnx.split")
    plain = jax.tree.map(lambda x: x, opt_state[0]._asdict())
    refused(MESH, (plain, *opt_state[1:]), r"in nodes of other types")


@pytest.mark.parametrize(
    "tx",
    [dense(), onebit_jax.ef_signsgd(1e-2, axis_name="data"), optax.chain(onebit(), optax.ema(0.9))],
    ids=["dense", "ef_signsgd", "more of it"],
)
def test_of_another_optimizer(tx):
    opt_state = onebit_jax.init(tx, make_params(), MESH)
    words = r"^opt_state is not a state of this optimizer.* is (missing|too much)\. Call .*init"
    refused(MESH, opt_state, words)


def test_of_the_same_with_other_options():
    opt_state = onebit_jax.init(
        onebit(exchange=onebit_jax.ExchangeOptions(residual_dtype="bfloat16")), make_params(), MESH
    )
    refused(MESH, opt_state, r"dtype bfloat16, but .* float32 is needed.*optimizer's options")


def test_of_other_parameters():
    other = {"layer": {"kernel": np.ones((9, 6), np.float32), "bias": np.ones(6, np.float32)}}
    refused(
        MESH,
        onebit_jax.init(onebit(), other, MESH),
        r"^opt_state\[0\].*has shape \(6,\).*\(5,\) and float32 is needed.*the parameters' shapes",
    )
    renamed = {"head": make_params()["layer"]}
    refused(MESH, onebit_jax.init(onebit(), renamed, MESH), r"\['layer'\]\['bias'\] is missing")


# Other meshes


def test_of_another_number_of_workers(mesh, other_kind):
    devices = jax.devices()[: WORKERS // 2]
    half = jax.make_mesh((WORKERS // 2,), ("data",), devices=devices, axis_types=(other_kind,))
    opt_state = onebit_jax.init(onebit(), make_params(), half)
    # Two workers have no server.
    words = r"server.* is missing.*onebit_jax.resize takes it to another number of workers"
    refused(mesh, opt_state, words)
    refused(mesh, jax.device_get(opt_state), words)


def test_on_other_devices(mesh, other_kind):
    devices = jax.devices()[-WORKERS:]
    others = jax.make_mesh((WORKERS,), ("data",), devices=devices, axis_types=(other_kind,))
    opt_state = onebit_jax.init(onebit(), make_params(), others)
    refused(mesh, opt_state, r"on a mesh of the axes .* or of other devices.*jax.device_get first")


@pytest.mark.parametrize("made", [((WORKERS,), ("workers",)), ((2, 2), PAIR)], ids=["name", "pair"])
def test_on_other_axes(mesh, other_kind, made):
    sizes, axes = made
    axis_name = axes if len(axes) == 2 else axes[0]
    tx = dense(axis_name)
    opt_state = onebit_jax.init(tx, make_params(), make_mesh(sizes, axes, other_kind))
    refused(mesh, opt_state, rf"on a mesh of the axes .*{axes[0]}.*the same mesh", tx=dense())


def test_moved_as_the_advice_says(saved):
    """Fetched from other devices, a state goes on bit for bit."""
    folder, step, expected, batches = saved
    others = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[-WORKERS:])
    params, opt_state = jax.device_get(restored_onto(others, folder))
    assert_equal(train(step, params, opt_state, batches), expected)


def test_sharded_parameters(mesh):
    opt_state = onebit_jax.init(onebit(), make_params(), mesh)
    whole = {"kernel": jnp.ones((8, 5)), "bias": jnp.ones(5)}
    split = NamedSharding(mesh, P("data"))
    params = {"layer": whole | {"kernel": jax.device_put(whole["kernel"], split)}}
    words = r"^parameter \['layer'\]\['kernel'\] is sharded.*jax.device_put\(params.*param_specs="
    refused(mesh, opt_state, words, params=params)
    with pytest.raises(ValueError, match=words):
        onebit_jax.init(onebit(), params, mesh)
