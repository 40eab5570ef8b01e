from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding
from onebit_jax.states.placed import place_leaves
from onebit_jax.states.specs import MeshAxes
from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import onebit_state


def on_task(task) -> Any:
    return task.on_mesh(OPTIMIZERS["onebit_adam"].make(SLOW))


def types(tree):
    return jax.tree.map(lambda x: jax.typeof(x).update(weak_type=False), tree)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_init_is_the_same_under_jit_and_eval_shape(kind):
    task = meshes.task("fsdp, tensor", kind)
    tx, params = on_task(task), task.params()
    with jax.set_mesh(task.mesh):
        state = tx.init(params)
        jitted = jax.jit(tx.init)(params)
        shapes = jax.eval_shape(tx.init, params)
        of_shapes = tx.init(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
            )
        )
    jax.tree.map(np.testing.assert_array_equal, state, jitted)
    jax.tree.map(np.testing.assert_array_equal, state, of_shapes)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, jitted)
    assert types(state) == types(jitted)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )


def test_large_leaves_lie_as_their_parameters_do():
    task = meshes.task("fsdp, tensor", "Auto")
    tx, params = on_task(task), task.params()
    own = onebit_state(tx.init(params))
    for name, x in own.v_then_inverse_root.items():
        assert x.shape == params[name].shape
        assert x.sharding.is_equivalent_to(params[name].sharding, x.ndim), name
    for path, x in jax.tree_util.tree_leaves_with_path(own):
        name = jax.tree_util.keystr(path)
        if x.ndim and not any(f"['{p}']" in name for p in params):
            split = np.prod([task.mesh.shape[a] for e in x.sharding.spec for a in meshes._names(e)])
            assert split == task.places, (path, x.sharding.spec)


def test_a_number_of_python_is_a_parameter():
    task = meshes.task("model", "Auto")
    tx: Any = sharding.on_mesh(
        onebit_jax.compressed_mean(SLOW), task.mesh, axis_name=SLOW, specs=P()
    )
    assert types(tx.init({"scale": 1.0})) == types(tx.init({"scale": np.float32(1)}))


def test_a_list_of_pieces_is_not_taken_for_the_parameters():
    axes = MeshAxes(meshes.task("fsdp, tensor", "Auto").mesh, SLOW)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = [struct(4, 8), struct(8, 4)]
    specs = [P("fsdp", None), P(None, "tensor")]
    # Shards [2, 8] and [8, 2].
    state = {"pieces": [struct(2, 8)], "like": [struct(2, 8), struct(8, 2)]}
    placed = place_leaves(axes, state, params, specs)
    assert [x.spec for x in placed["like"]] == specs
    assert placed["pieces"][0].spec == P("tensor", "fsdp", None)
    assert placed["pieces"][0].shape == (2, 4, 8)


OPTAX_CONTRACT = [
    "compressed_mean",
    "signum",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("onebit_adam", "birder", "distributed_lion", "ef_signsgd", "zero_one_adam")
    ),
]


@pytest.mark.parametrize("name", OPTAX_CONTRACT)
def test_optax_contract_of_types(name):
    """As in Optax's own `_src/sharding_test.py`, with float16; `update` under vmap."""
    mesh = jax.make_mesh((2, 4), (SLOW, "x"), axis_types=(AxisType.Explicit,) * 2)
    tx: Any = sharding.on_mesh(OPTIMIZERS[name].make(SLOW), mesh, axis_name=SLOW)
    abstract = tx.init(jax.ShapeDtypeStruct(shape=(2, 4, 8), dtype=jnp.float32))
    assert abstract is not None
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, P(None, "x"))
        params = jnp.zeros((2, 8, 4), dtype=jnp.float16, out_sharding=split)
        state = tx.init(params)
        assert types(state) == types(jax.jit(tx.init)(params))
        params, state = sharding.worker_copies((params, state), mesh, axis_name=SLOW)
        updates, new = jax.vmap(tx.update)(params, state, params)
        jitted = jax.jit(jax.vmap(tx.update))(params, state, params)
    assert types(new) == types(state) == types(jitted[1])
    assert types(updates) == types(params) == types(jitted[0])


@pytest.mark.slow
def test_other_transformations_stand_outside():
    """Muon orthogonalizes whole matrices, behind a mean of bits of their shards."""
    task = meshes.task("fsdp, tensor", "Auto")
    params = {name: x for name, x in task.params().items() if x.ndim == 2}
    specs = {name: task.specs[name] for name in params}
    mean: Any = sharding.on_mesh(
        onebit_jax.compressed_mean(SLOW), task.mesh, axis_name=SLOW, specs=specs
    )
    tx: Any = optax.chain(mean, optax.contrib.muon(0.1))
    grads = {name: np.ones((2, *x.shape), np.float32) for name, x in params.items()}
    state = sharding.worker_copies((params, tx.init(params)), task.mesh, axis_name=SLOW)
    update = jax.vmap(lambda g, s: tx.update(g, s[1], s[0])[0], spmd_axis_name=SLOW)
    updates = jax.jit(update)(grads, state)
    alone: Any = optax.contrib.muon(0.1)
    # All signs are alike, and scales exact: the mean is the gradient.
    plain = jax.tree.map(lambda x: np.asarray(x[0]), grads)
    expected, _ = alone.update(plain, alone.init(params), params)
    for name in params:
        np.testing.assert_allclose(updates[name][0], expected[name], rtol=1e-4, atol=1e-6)
