"""What optimizers share that begin dense and then compress: programs, state, bytes, bad input."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.runs import Sizes, axis_of, mesh_of
from tests.workers import AXIS, NODE, PAIR, Binding, draw, on_workers, replicate


class Case(NamedTuple):
    """An optimizer, and the phases of its first updates."""

    make: Any
    options: dict[str, Any]
    phases: list[Any]
    wrong: list[tuple[Any, int]]  # phases, and updates that are not in them
    state_bytes: float  # an element, but for what shrinks with more workers
    out_of_range: dict[str, tuple[Any, ...]]


CASES = {
    "1-bit LAMB": Case(
        onebit_jax.scale_by_onebit_lamb,
        {"b2": 0.9, "warmup": 3},
        ["warmup"] * 3 + ["compression"] * 3,
        [("compression", 2), ("warmup", 3)],
        12.4,
        {
            "warmup": (0, 1.5, True, None),
            "coeff_beta": (1.0, -0.1),
            "min_coeff": (0, math.nan, 11.0),
            "max_coeff": (0, math.inf),
            "min_ratio": (0, 1.1, math.nan),
            "max_ratio": (0.9, math.inf),
            "ratio_threshold": (0, 1, math.nan),
            "weight_decay": (-0.1, math.nan, "0.1"),
        },
    ),
    "0/1 Adam": Case(
        onebit_jax.zero_one_adam,
        {
            "learning_rate": 0.01,
            "variance_freeze": 4,
            "variance_steps": lambda t: (t % 2 == 0) & (t < 4),
            "sync_steps": lambda t: t % 2 == 1,
        },
        ["warmup", "compression"] * 2 + ["local", "sync"] * 2,
        [("local", 3), ("sync", 3), ("warmup", 4), ("compression", 4)],
        20.3,
        {
            "variance_freeze": (-1, 0, 1.5, True, "10", None, jnp.float32(10)),
            "learning_rate": (math.nan, math.inf),
            "var_update_scaler": (0, 2.0),
            "local_step_scaler": (-1, True),
            "local_step_clipper": (0, None),
            "variance_steps": (3, [0, 1], True),
            "sync_steps": (3, [0, 1]),
        },
    ),
}
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "b1": (1.0, -0.1),
    "b2": (1.0, math.nan),
    "eps": (0, math.inf),
    "scale": ("max",),
    "residual_dtype": ("float16",),
    "local_dtype": ("float16", "bfloat16"),
    "bucket_bytes": (0, 100, True),
}
each = pytest.mark.parametrize("name", CASES)


def transformation(name: str, sizes: Sizes = 2, **options: Any) -> Any:
    return CASES[name].make(**{"axis_name": axis_of(sizes)} | CASES[name].options | options)


@functools.cache
def program(
    name: str, phase: Any = None, sizes: Sizes = 2, binding: Binding = "vmap", **options: Any
) -> Callable[..., Any]:
    tx = transformation(name, sizes, **options)
    return on_workers(functools.partial(tx.update, phase=phase), sizes, binding)


@functools.cache
def starts(name: str, sizes: Sizes = 2) -> list[Any]:
    """Gradients, state and parameters before each of the first updates, on the host."""
    shape, workers = (16, 16) if sizes == 2 else (72, 64), mesh_of(sizes).size
    gradients, found = draw(1, len(CASES[name].phases), workers, shapes=shape), []
    params = replicate(draw(0, shapes=shape), workers)
    state = on_workers(transformation(name, sizes).init, sizes)(params)
    for grads in gradients:
        found.append(jax.device_get((grads, state, params)))
        updates, state = program(name, None, sizes)(*found[-1])
        params = params + updates
    return found


@pytest.mark.parametrize("binding", ["vmap", "pmap", "shard_map"])
@each
def test_every_program_makes_the_same_update(name, binding):
    """Programs of one phase and the one that chooses, bit for bit.

    On a mesh XLA contracts other sums and products, and adds norms up in another order.
    """
    for phase, start in zip(CASES[name].phases, starts(name), strict=True):
        chosen = jax.device_get(program(name)(*start))
        if binding == "vmap":
            chex.assert_trees_all_equal(program(name, phase)(*start), chosen, strict=True)
            continue
        on_mesh = jax.device_get(program(name, None, 2, binding)(*start))
        exchanges = [state.exchange for _, state in (on_mesh, chosen)]
        chex.assert_trees_all_equal(*exchanges, strict=True)
        chex.assert_trees_all_close(on_mesh, chosen, rtol=1e-6, atol=1e-6)


@each
def test_a_phase_of_the_other_side_of_the_freeze_changes_nothing(name):
    for phase, t in CASES[name].wrong:
        _, before, _ = starts(name)[t]
        updates, after = jax.device_get(program(name, phase)(*starts(name)[t]))
        assert not np.any(updates)
        assert np.all(after.progress.phase == -1)
        progress = after.progress._replace(phase=before.progress.phase)
        chex.assert_trees_all_equal(after._replace(progress=progress), before, strict=True)


@each
def test_bfloat16_parameters_are_computed_with_in_float32(name):
    for start in starts(name)[2:6]:
        state, (grads, params) = start[1], (x.astype(jnp.bfloat16) for x in start[::2])
        half, _ = program(name)(grads, state, params)
        single, _ = program(name)(grads.astype(jnp.float32), state, params.astype(jnp.float32))
        assert half.dtype == jnp.bfloat16
        unit = float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(half.astype(jnp.float32), single, rtol=unit)


@each
def test_between_nodes_buckets_change_nothing_and_bfloat16_little(name):
    grads, state, params = starts(name, (2, 2))[-1]
    exchange, phase = state.exchange, CASES[name].phases[-1]
    assert exchange.packed.shape[-1] > 128
    single, expected = jax.device_get(program(name, None, (2, 2))(grads, state, params))
    cut = program(name, phase, (2, 2), bucket_bytes=128)(grads, state, params)
    chex.assert_trees_all_equal(jax.device_get(cut), (single, expected), strict=True)
    kept = {x: getattr(exchange, x) for x in ("worker_compensated", "server_compensated")}
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), kept)
    state = state._replace(exchange=exchange._replace(**halves))
    options: Any = {"residual_dtype": "bfloat16", "local_dtype": "bfloat16"}
    half, after = program(name, phase, (2, 2), **options)(grads, state, params)
    chex.assert_trees_all_equal_dtypes(after, state)
    assert not np.array_equal(half, single)
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(half, single, rtol=0.02, atol=1e-4)) > 0.95


@each
def test_one_device_a_node_is_the_flat_form(name):
    def text(axis_name):
        tx, params = transformation(name, axis_name=axis_name), jnp.zeros((4, 9))
        state = jax.eval_shape(on_workers(tx.init, (4, 1)), params)
        return on_workers(tx.update, (4, 1)).lower(params, state, params).as_text()

    assert text(PAIR) == text(NODE)


@pytest.mark.parametrize("sizes", [4, (2, 4)], ids=str)
@each
def test_bytes_alone_cross_between_nodes_but_in_warmup(name, sizes):
    size, mesh = 2**21, mesh_of(sizes)
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    tx = transformation(name, sizes, bucket_bytes=None)
    params = [jax.ShapeDtypeStruct((mesh.size, *shape), "float32") for shape in ((size - 9,), (9,))]
    state = jax.eval_shape(on_workers(tx.init, sizes), params)
    for phase in sorted(set(CASES[name].phases[0 if per_node == 1 else -2 :])):
        update = on_workers(functools.partial(tx.update, phase=phase), sizes, "shard_map")
        sent = wire.collectives(update.lower(params, state, params).compile(), mesh)
        across = [c for c in sent if mesh.axis_names[0] in c.axis]
        ops = sorted((c.op, c.dtype) for c in across)
        within = {c.dtype for c in sent if c not in across}
        expected = {"f32"} if phase == "local" else {"f32", "u8"}
        assert within == (expected if per_node > 1 else set())
        if phase == "warmup":
            assert set(ops) == {("all-reduce", "f32")}
        elif phase == "local":
            assert not ops
        else:
            assert ops == [("all-gather", "u8"), ("all-to-all", "u8")]
            floor = 2 * (nodes - 1) / nodes * size / (8 * per_node)
            assert floor <= wire.bytes_sent(across) <= 1.005 * floor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@each
def test_the_state_is_small_and_keeps_its_dtypes_as_updates_do_the_gradients(name, dtype):
    workers, size, case = 4, 2**20, CASES[name]
    static = [option for option in case.options if option.endswith("_steps")]
    with jax.enable_x64(dtype == "float64"):
        params = [jax.ShapeDtypeStruct((workers, *s), dtype) for s in ((size - 99,), (9, 11))]
        make = optax.inject_hyperparams(case.make, static, hyperparam_dtype=jnp.dtype(dtype))
        injected = make(axis_name=AXIS, weight_decay=0.1, **case.options)
        for tx in (injected, transformation(name, weight_decay=0.1)):
            state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
            for phase in (None, *set(case.phases)):
                # Extra arguments that belong to others are accepted.
                update = functools.partial(tx.update, phase=phase, value=1.0)
                made = jax.eval_shape(jax.vmap(update, axis_name=AXIS), params, state, params)
                chex.assert_trees_all_equal_shapes_and_dtypes(made, (params, state))
                # Or the second update would be compiled anew.
                assert [x.weak_type for x in jax.tree.leaves(made[1])] == [
                    x.weak_type for x in jax.tree.leaves(state)
                ]
        of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / workers
        assert of_one_worker <= (case.state_bytes + 4 / workers) * size


@pytest.mark.parametrize("shapes", [{"empty": (0, 3)}, {}], ids=str)
@each
def test_only_empty_tensors_and_none_at_all(name, shapes):
    tx = transformation(name)

    def updates(grads, _):
        state = tx.init(grads)
        for phase in CASES[name].phases:
            u, state = tx.update(grads, state, grads, phase=phase)
        return u, state.metrics()

    u, metrics = on_workers(updates, 2)(draw(0, 2, shapes=shapes), jnp.zeros(2))
    assert jax.tree.map(jnp.shape, u) == {name: (2, *shape) for name, shape in shapes.items()}
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(metrics))


# Bad input.


@each
def test_a_hyperparameter_out_of_range_is_named(name):
    for field, values in (OUT_OF_RANGE | CASES[name].out_of_range).items():
        for value in values:
            shown = "|".join(re.escape(show(value)) for show in (str, repr))
            with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
                transformation(name, **{field: value})


@pytest.mark.parametrize("axis_name", ["elsewhere", None, 3, (NODE, "elsewhere"), (NODE, NODE)])
@each
def test_an_axis_that_is_not_bound_is_named(name, axis_name):
    tx = transformation(name, axis_name=axis_name)
    with pytest.raises(ValueError, match=rf"^axis_name={re.escape(repr(axis_name))}"):
        jax.eval_shape(on_workers(tx.init, (2, 2)), jnp.zeros((4, 3)))


@each
def test_arguments_that_do_not_fit_are_named(name):
    tx = transformation(name)
    before, changed = ({"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, n))} for n in (4, 5))
    with pytest.raises(ValueError, match=r"\['b'\] has dtype int32"):
        jax.eval_shape(on_workers(tx.init, 2), before | {"b": jnp.ones((2, 3), jnp.int32)})
    state = jax.eval_shape(on_workers(tx.init, 2), before)
    update = on_workers(tx.update, 2)
    for given in ((changed, state, before), (before, state, changed)):
        with pytest.raises(ValueError, match=r"since init.*\['b'\]: \(4,\) at init, \(5,\) now"):
            jax.eval_shape(update, *given)
    with pytest.raises(ValueError, match=r"^params=None.*call update\(gradients, state, params\)"):
        jax.eval_shape(update, before, state)
    update = on_workers(functools.partial(tx.update, phase="variance"), 2)
    with pytest.raises(ValueError, match="phase='variance' must be one of 'warmup', 'compression'"):
        jax.eval_shape(update, before, state, before)
