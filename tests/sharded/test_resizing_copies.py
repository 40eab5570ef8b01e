"""`resize` of the copies that the training step of any trainer has.

What becomes of them is what becomes of the same state in the form of `train_step`, in which workers
have one copy of what they share.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding
from onebit_jax.markers import is_per_worker
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import PAIR, make_mesh

SPECS = {"matrix": P("fsdp", None), "bias": P(None)}
SHAPES = {"matrix": (16, 4), "bias": (4,)}
# What `on_mesh` is given.
OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": lambda axis: onebit_jax.onebit_adam(2e-2, warmup=3, axis_name=axis),
    "onebit_adam, warm-up": lambda axis: onebit_jax.onebit_adam(2e-2, warmup=40, axis_name=axis),
    "compressed_mean, adam": lambda axis: onebit_jax.compressed_mean(axis),
    "local_steps": lambda axis: onebit_jax.local_steps(
        optax.adam(2e-2), optax.sgd(1.0), every=3, axis_name=axis, bits=4
    ),
    "zero_one_adam": lambda axis: onebit_jax.zero_one_adam(2e-2, variance_freeze=3, axis_name=axis),
}


def mesh_of(workers: int | tuple[int, int], kind: str = "Auto", fast: int = 2) -> Mesh:
    if isinstance(workers, int):
        return make_mesh((workers, fast), (SLOW, "fsdp"), meshes.TYPES[kind])
    return make_mesh((*workers, fast), (*PAIR, "fsdp"), meshes.TYPES[kind])


def axis_of(mesh: Mesh) -> Any:
    return SLOW if SLOW in mesh.shape else PAIR


def specs_on(mesh: Mesh) -> Any:
    return None if mesh.axis_types[0] == AxisType.Explicit else SPECS


def on_mesh(name: str, mesh: Mesh) -> Any:
    """What a trainer uses."""
    axis = axis_of(mesh)
    tx = sharding.on_mesh(OPTIMIZERS[name](axis), mesh, axis_name=axis, specs=specs_on(mesh))
    return beside_adam(name, tx)


def beside_adam(name: str, tx: Any) -> Any:
    return optax.chain(tx, optax.adam(2e-2)) if name == "compressed_mean, adam" else tx


def draw(mesh: Mesh) -> Any:
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    return put(drawn, mesh)


def put(params: Any, mesh: Mesh) -> Any:
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return jax.device_put(jax.device_get(params), shardings)


def copies(tree: Any, mesh: Mesh) -> Any:
    return sharding.worker_copies(tree, mesh, axis_name=axis_of(mesh))


def set_if_explicit(mesh: Mesh) -> Any:
    return contextlib.nullcontext() if specs_on(mesh) else jax.set_mesh(mesh)


def train(mesh: Mesh, tx: Any, state: Any = None, steps: int = 5) -> tuple[Any, list[float]]:
    """The state of all workers, and the loss before each step."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        matrix = params["matrix"]
        matrix = matrix if specs_on(mesh) else jax.reshard(matrix, P(None, None))
        return jnp.mean((x @ matrix + params["bias"] - jnp.sin(3 * x[:, :4])) ** 2)

    rows = np.random.default_rng(1).standard_normal((16, 16), np.float32)
    with set_if_explicit(mesh):
        x = jax.device_put(rows, NamedSharding(mesh, P(axis_of(mesh), None)))
        state = state or copies((draw(mesh), tx.init(draw(mesh))), mesh)
        step = jax.jit(
            sharding.worker_step(meshes.train_step(tx, loss_fn), mesh, axis_name=axis_of(mesh))
        )
        losses = []
        for _ in range(steps):
            state, metrics = step(state, x)
            losses.append(float(metrics["loss"]))
    return state, losses


def resized(opt_state: Any, tx: Any, before: Any, after: Mesh, **how: Any) -> Any:
    split = {"axis_name": axis_of(after), "param_specs": specs_on(after)}
    how = {"from_axes": before, **split, **how}
    return onebit_jax.resize(opt_state, tx, draw(after), after, **how)


def go_on(name: str, params: Any, moved: Any, after: Mesh) -> None:
    """Trains on the new mesh, with parameters as docs/sharded.md takes them there."""
    differ = name in ("local_steps", "zero_one_adam")
    one = jax.tree.map(lambda x: x.mean(0), params) if differ else sharding.worker_copy(params)
    params = copies(put(one, after), after)
    if name == "local_steps":
        # What every worker would move its parameters to.
        for key, x in moved.own.value.items():
            np.testing.assert_allclose(x, params[key], rtol=0, atol=1e-6, err_msg=key)
    tx = on_mesh(name, after)
    fresh = copies(tx.init(draw(after)), after)
    jax.tree.map(check_alike, moved, fresh)
    (params, _), losses = train(after, tx, (params, moved), steps=30)
    assert losses[-1] < 0.7 * losses[0]
    if not differ:
        meshes.assert_replicas_agree(params)


def check_alike(x: jax.Array, y: jax.Array) -> None:
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def assert_same(tree: Any, expected: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), y in zip(leaves, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))
        if isinstance(y, jax.Array):
            check_alike(x, y)


def mesh_view(state: Any) -> Any:
    """On the host, of what workers share the first one's copy."""
    return jax.tree.map(
        lambda node: node if is_per_worker(node) else jax.tree.map(lambda x: x[0], node),
        jax.device_get(state),
        is_leaf=is_per_worker,
    )


@pytest.mark.parametrize(
    ("name", "kind", "workers", "to_workers"),
    [
        ("compressed_mean, adam", "Auto", 4, 2),
        pytest.param("onebit_adam", "Auto", 4, 2, marks=pytest.mark.slow),
        pytest.param("onebit_adam", "Explicit", 2, 4, marks=pytest.mark.slow),
        pytest.param("onebit_adam, warm-up", "Auto", 4, 2, marks=pytest.mark.slow),
        pytest.param("compressed_mean, adam", "Explicit", 4, 2, marks=pytest.mark.slow),
        pytest.param("local_steps", "Auto", 4, 2, marks=pytest.mark.slow),
        pytest.param("local_steps", "Explicit", 4, 2, marks=pytest.mark.slow),
        pytest.param("zero_one_adam", "Auto", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_copies_become_what_the_state_of_train_step_does(name, kind, workers, to_workers):
    before, after = mesh_of(workers, kind), mesh_of(to_workers, kind)
    tx = beside_adam(name, OPTIMIZERS[name](SLOW))
    (params, opt_state), _ = train(before, on_mesh(name, before))
    moved = resized(opt_state, tx, before, after)
    of_train_step = mesh_view(opt_state)
    expected = resized(of_train_step, tx, before, after)
    assert_same(mesh_view(moved), jax.device_get(expected))
    go_on(name, params, moved, after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (mesh_of((2, 2)), mesh_of((1, 2))),
        (mesh_of((2, 2), "Explicit"), mesh_of((2, 1), "Explicit")),
        (mesh_of(4, fast=1), mesh_of(2, fast=1)),
        (mesh_of(1), mesh_of(2)),
    ],
    ids=lambda mesh: str(dict(mesh.shape)),
)
def test_other_meshes(before, after):
    """Pairs of axes; fast axes of size 1, which compiled steps leave out of shardings."""
    name = "compressed_mean, adam"
    tx = beside_adam(name, OPTIMIZERS[name](axis_of(after)))
    (params, opt_state), _ = train(before, on_mesh(name, before))
    go_on(name, params, resized(opt_state, tx, before, after), after)


def begun(mesh: Mesh, name: str = "compressed_mean, adam") -> Any:
    return copies(on_mesh(name, mesh).init(draw(mesh)), mesh)


def test_what_needs_whole_tensors_is_taken_along_as_parameters_are():
    """Of a chain with `optax.lamb`, which is refused inside, `resize` takes the other part."""
    before, after = mesh_of(4), mesh_of(2)
    mean = onebit_jax.compressed_mean(SLOW)

    def chain(mesh):
        return optax.chain(
            sharding.on_mesh(mean, mesh, axis_name=SLOW, specs=SPECS), optax.lamb(1e-2)
        )

    opt_state = copies(chain(before).init(draw(before)), before)
    moved = resized(opt_state[0], mean, before, after), opt_state[1]
    assert_same(moved[0], copies(chain(after).init(draw(after)), after)[0])
    with pytest.raises(ValueError, match="stand outside"):
        resized(opt_state, optax.chain(mean, optax.lamb(1e-2)), before, after)


def test_copies_of_another_number_of_workers_are_refused():
    before, after, name = mesh_of(4), mesh_of(2), "compressed_mean, adam"
    tx, opt_state = beside_adam(name, OPTIMIZERS[name](SLOW)), begun(before)
    with pytest.raises(ValueError, match="for these parameters and 5 workers"):
        resized(opt_state, tx, {SLOW: 5, "fsdp": 2}, after)


@pytest.mark.parametrize("kind", meshes.TYPES)
def test_the_copy_of_one_worker(kind):
    mesh = mesh_of(4, kind)
    state = draw(mesh) | {"key": jax.random.key(1), "count": jnp.int32(3)}
    one = sharding.worker_copy(copies(state, mesh), 3)
    found, expected = (jax.random.key_data(x.pop("key")) for x in (one, state))
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, one, state)
    assert one["matrix"].sharding.is_equivalent_to(state["matrix"].sharding, 2)
