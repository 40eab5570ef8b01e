"""States taken to other numbers of workers, and from Adam and back: no residual is lost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms.birder import ScaleByBirderState
from tests import small_task, workers
from tests.optimizers import FROZEN, OPTIMIZERS, WITH_NODES
from tests.runs import axis_of, mesh_of
from tests.small_task import MESH, make_batches, make_mesh, make_params
from tests.views import carried as carried_of_rows
from tests.views import total_residual
from tests.workers import (
    AXIS,
    assert_workers_agree,
    draw,
    find_state,
    mesh_view,
    on_workers,
    onebit_state,
    replicate,
    with_rows,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Tensors that are padded, and one that is not; an empty one.
SHAPES = {"matrix": (64, 5), "odd": (37,), "empty": (0, 2), "scalar": ()}
STEPS = 6
SIZES = [(8, 4), (4, 8), (4, 3), ((2, 4), (4, 2)), (8, (2, 4)), ((2, 4), 3), (4, 1), (1, 2)]


def axes(sizes) -> dict[str, int]:
    return dict(mesh_of(sizes).shape)


def train(make, sizes, params, gradients, state=None):
    """Updates `[steps, ...]` and parameters of worker 0, and the state in the mesh view."""
    if state is not None:
        state = with_rows(jax.device_get(state), mesh_of(sizes).size)
    run = workers.train(make(axis_of(sizes)), sizes, params, gradients, state=state)
    params = jax.tree.map(lambda x: x[0, -1], run.params)
    return jax.tree.map(lambda x: x[0], run.updates), params, mesh_view(run.state)


def resized(make, before, after, state, params, make_from=None):
    from_tx, tx = ((f or make)(axis_of(x)) for f, x in ((make_from, before), (make, after)))
    mesh = make_mesh(tuple(axes(after).values()), tuple(axes(after)))
    moved = onebit_jax.resize(state, tx, params, mesh, from_axes=axes(before), from_tx=from_tx)
    assert_workers_agree(with_rows(jax.device_get(moved), mesh_of(after).size))
    return moved


def carried(tx, state, params, sizes):
    """Momenta and total residuals, as arrays."""
    return carried_of_rows(tx, with_rows(jax.device_get(state), mesh_of(sizes).size), params, sizes)


def gradients(seed, sizes):
    """Of each worker, around a mean that differs from element to element."""
    drawn = draw(seed, mesh_of(sizes).size, STEPS, shapes=SHAPES)
    return jax.tree.map(np.add, drawn, draw(99, shapes=SHAPES))


def assert_close(one, other, tolerance=1e-6):
    for got, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        limit = tolerance * max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(got, expected, rtol=0, atol=limit)


def zeros():
    return jax.tree.map(np.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def summed(updates):
    return jax.tree.map(lambda x: x.sum(0, dtype=np.float64), updates)


def mean_summed(grads):
    return jax.tree.map(lambda x: x.mean(0, dtype=np.float64).sum(0), grads)


def residual_of(exchange, bits, sizes):
    """`mean_i e_i + E` of a state's exchange."""
    rows = with_rows(jax.device_get(exchange), mesh_of(sizes).size)
    return total_residual(ExchangeOptions().at_bits(axis_of(sizes), bits), rows, zeros(), sizes)


@pytest.mark.parametrize(
    ("bits", "before", "after"),
    [
        pytest.param(*case, marks=() if case == (4, 4, 3) else pytest.mark.slow)
        for case in [*((1, *sizes) for sizes in SIZES), (4, 4, 3), (8, 4, 3)]
    ],
)
def test_a_compressed_mean_loses_nothing_between_any_sizes(bits, before, after):
    """The sum of gradients is in updates or residuals: before, right after, and later on."""
    make = functools.partial(onebit_jax.compressed_mean, bits=bits)
    first, second = gradients(0, before), gradients(1, after)
    u, params, state = train(make, before, zeros(), first)
    expected = jax.tree.map(np.subtract, mean_summed(first), summed(u))
    left = residual_of(state.exchange, bits, before)
    assert_close(left, expected, 1e-5)
    state = resized(make, before, after, state, params)
    assert_close(residual_of(state.exchange, bits, after), left, 1e-6)
    u, _, state = train(make, after, zeros(), second, state)
    expected = jax.tree.map(lambda r, g, x: r + g - x, expected, mean_summed(second), summed(u))
    assert_close(residual_of(state.exchange, bits, after), expected, 1e-5)


def begun_with(name, leaves):
    """What the next update begins with: a compressed momentum is sent again with its residual."""
    if not OPTIMIZERS[name].has_warmup:
        return leaves
    momenta, residuals = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
    return [m + r / 0.9 for m, r in zip(momenta, residuals, strict=False)]


FAST = ("onebit_adam", "distributed_lion")
# Of these more than one float for a parameter is taken along, or none.
MOVED = [x for x in OPTIMIZERS if x not in ("mean_gradients", "birder", "fetch_sgd", "cada")]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param(
            name, *sizes, marks=() if name in FAST and sizes == (4, 3) else pytest.mark.slow
        )
        for name in MOVED
        for sizes in [(4, 3), ((2, 4), (4, 2))]
        if sizes == (4, 3) or name in WITH_NODES
    ],
)
def test_momenta_and_residuals_come_along_whole_and_training_goes_on(name, before, after):
    make = OPTIMIZERS[name].make
    shapes = {"matrix": (64, 5), "odd": (37, 3), "vector": (11,)}
    drawn = draw(0, mesh_of(before).size, STEPS, shapes=shapes)
    _, params, state = train(make, before, draw(5, shapes=shapes), drawn)
    expected = begun_with(name, carried(make(axis_of(before)), state, params, before))
    moved = resized(make, before, after, state, params)
    found = begun_with(name, carried(make(axis_of(after)), moved, params, after))
    assert_close(found, expected, 2e-6)
    drawn = draw(1, mesh_of(after).size, STEPS, shapes=shapes)
    updates, *_ = train(make, after, params, drawn, moved)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@pytest.mark.slow
def test_other_options_of_the_exchange_take_the_residuals_over():
    one, eight = (functools.partial(onebit_jax.compressed_mean, bits=bits) for bits in (1, 8))
    _, params, state = train(one, 4, zeros(), gradients(0, 4))
    left = residual_of(state.exchange, 1, 4)
    moved = resized(eight, 4, 2, state, params, make_from=one)
    assert_close(residual_of(moved.exchange, 8, 2), left)

    fine = functools.partial(onebit_jax.scale_by_onebit_adam, warmup=3, **FROZEN)
    coarse = functools.partial(fine, exchange=ExchangeOptions(residual_dtype="bfloat16"))
    made = [lambda axis_name, f=f: f(axis_name=axis_name) for f in (fine, coarse)]
    _, params, state = train(made[0], 4, zeros(), gradients(0, 4))
    expected = carried(made[0](AXIS), state, params, 4)
    moved = resized(made[1], 4, 4, state, params, make_from=made[0])
    held = jax.tree.leaves(moved.momentum.m_then_compensated)
    assert {x.dtype for x in held} == {jnp.dtype("bfloat16")}
    found = carried(made[1](AXIS), moved, params, 4)
    assert_close(begun_with("onebit_adam", found), begun_with("onebit_adam", expected), 2**-6)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(8, 4), ((2, 4), (4, 2)), ((2, 4), 3)])
def test_birders_averages_are_averaged(before, after):
    """|m| <= a, and inactive elements stay so."""
    make = OPTIMIZERS["birder"].make
    grads = jax.tree.map(np.copy, gradients(0, before))
    grads["odd"][..., :5] = 0
    _, params, state = train(make, before, zeros(), grads)
    moved = jax.device_get(resized(make, before, after, state, params))
    ours, theirs = (find_state(ScaleByBirderState, s) for s in (moved, state))
    for m, a in zip(jax.tree.leaves(ours.m), jax.tree.leaves(ours.a), strict=True):
        assert np.all(np.abs(m) <= a)
    # Whatever pieces they are in, their sums are those of the workers' means.
    for x, y in ((ours.m, theirs.m), (ours.a, theirs.a)):
        sums = [
            sum(piece.sum(dtype=np.float64) for piece in jax.tree.leaves(tree)) / nodes
            for tree, nodes in ((x, np.ravel(after)[0]), (y, np.ravel(before)[0]))
        ]
        np.testing.assert_allclose(*sums, rtol=1e-4)
    updates, *_ = train(make, after, zeros(), gradients(1, after), moved)
    assert np.all(updates["odd"][0, :5] == 0)
    assert np.all(np.abs(updates["odd"][0, 5:]) > 0)


@pytest.mark.parametrize(
    "name",
    [
        x
        if x in (*FAST, "birder", "local_steps, streaming")
        else pytest.param(x, marks=pytest.mark.slow)
        for x in OPTIMIZERS
    ],
)
def test_a_skipping_wrapper_and_every_state_in_it_come_along(name):
    tx = onebit_jax.skip_nonfinite(OPTIMIZERS[name].make(AXIS), AXIS)
    params = {"w": jnp.ones((6, 3)), "b": jnp.ones(3)}
    before, after = (make_mesh((n,), (AXIS,)) for n in (4, 2))
    state: Any = onebit_jax.init(tx, params, before)
    state = state._replace(skips=state.skips._replace(steps=state.skips.steps + 7))
    moved = onebit_jax.resize(state, tx, params, after, from_axes=before)
    fresh = onebit_jax.init(tx, params, after)
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, fresh)
    assert moved.skips.steps == 7


NO_TENSORS = {
    "Muon of matrices": lambda: onebit_jax.onebit_muon(1e-2, axis_name=AXIS),
    "an unused group": lambda: optax.partition(
        {name: onebit_jax.onebit_adam(1e-2, axis_name=AXIS, **FROZEN) for name in "ab"}, {"w": "a"}
    ),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_a_group_without_tensors_comes_along(name):
    def loss_of_rows(params, batch):
        return jnp.mean((batch @ params["w"].T - 1) ** 2)

    tx, params, batch = NO_TENSORS[name](), {"w": jnp.ones((6, 3))}, np.ones((4, 3), np.float32)
    before, after = (jax.sharding.AbstractMesh((n,), (AXIS,)) for n in (4, 2))
    state = onebit_jax.init(tx, params, before)
    params, state, _ = onebit_jax.train_step(loss_of_rows, tx, before)(params, state, batch)
    moved = onebit_jax.resize(state, tx, params, after, from_axes=before)
    assert jax.tree.structure(moved) == jax.tree.structure(onebit_jax.init(tx, params, after))
    onebit_jax.train_step(loss_of_rows, tx, after).lower(params, moved, batch)


# What does not fit


# The others have nothing that belongs to a worker.
@pytest.mark.parametrize(
    "name", [x for x in OPTIMIZERS if x not in ("mean_gradients", "fetch_sgd")]
)
def test_a_state_by_hand_is_refused(name):
    """Rows of four workers: all of them given to one, or the first to fewer without a word."""
    tx, given = OPTIMIZERS[name].make(AXIS), replicate(zeros(), 4)
    state = jax.eval_shape(on_workers(tx.init, 4), given)

    def update(workers, state):
        grads = jax.tree.map(lambda x: x[:workers], given)
        with pytest.raises((ValueError, TypeError)):
            jax.eval_shape(on_workers(tx.update, workers), grads, state, grads)

    def first(x, workers=1):
        return jax.ShapeDtypeStruct((workers, *x.shape[1:]), x.dtype)

    def all_to_one(x):
        return jax.ShapeDtypeStruct((1, x.shape[0], *x.shape[2:]), x.dtype)

    update(
        1,
        jax.tree.map(
            lambda x: jax.tree.map(all_to_one if is_per_worker(x) else first, x),
            state,
            is_leaf=is_per_worker,
        ),
    )
    # Each worker's own residual of the largest values has all of a tensor, whatever their number.
    has_chunks = OPTIMIZERS[name].has_residuals and "largest" not in name
    for n in (1, 2) if has_chunks else ():
        update(n, jax.tree.map(functools.partial(first, workers=n), state))


@pytest.mark.parametrize(("before", "swapped"), [((4, 1), (1, 4)), ((2, 4), (4, 2))])
def test_sizes_in_the_wrong_order_are_refused(before, swapped):
    params = zeros()
    tx = onebit_jax.compressed_mean(workers.PAIR)
    state = onebit_jax.init(tx, params, make_mesh(before, workers.PAIR))
    to = make_mesh((2, 2), workers.PAIR)
    with pytest.raises(ValueError, match="opt_state"):
        onebit_jax.resize(state, tx, params, to, from_axes=axes(swapped))
    onebit_jax.resize(state, tx, params, to, from_axes=axes(before))


# From Adam, and back


def adam_state(updates):
    tx, params = optax.adam(1e-3), make_params()
    state = tx.init(params)
    for _ in range(updates):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return state


def falling(rate, **options):
    return onebit_jax.onebit_adam(rate, warmup=4, axis_name="data", **options)


@pytest.mark.slow
def test_from_adam_into_compression_and_back():
    """One more dense update is Adam's own; then what is compressed goes on from its moments."""
    mesh = make_mesh((4,), (AXIS,))
    rate = optax.linear_schedule(0.1, 0.0, 50)
    dense = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(rate))
    tx = onebit_jax.onebit_adam(rate, weight_decay=1e-4, warmup=STEPS, axis_name=AXIS, **FROZEN)
    _, params, state = train(lambda _: dense, 4, draw(3, shapes=SHAPES), gradients(0, 4))
    second = gradients(1, 4)
    expected, *_ = train(lambda _: dense, 4, params, second, state)
    state = onebit_jax.from_adam(state, tx, params, mesh)
    ours, _, state = train(lambda _: tx, 4, params, second, state)
    one, other = (jax.tree.map(lambda x: x[0], u) for u in (ours, expected))
    assert_close(one, other, 1e-6)
    onebit = onebit_state(state)
    assert onebit.progress.frozen_at == STEPS + 1
    adam: Any = onebit_jax.to_adam(state, tx, params, mesh)
    assert adam.count == 2 * STEPS
    # The momentum, and the residuals as the next update would have taken them in.
    leaves = carried(tx, state, params, 4)
    assert_close(adam.mu, [m + r / 0.9 for m, r in zip(leaves[:4], leaves[4:8], strict=True)])
    frozen = 1 / (np.sqrt(adam.nu["odd"] / (1 - 0.999 ** (2 * STEPS))) + 1e-8)
    np.testing.assert_allclose(frozen, onebit.v_then_inverse_root["odd"], rtol=1e-4)


def test_what_is_no_state_of_adam_is_refused():
    tx, params, mesh = falling(0.1), {"w": jnp.zeros(4)}, make_mesh((2,), ("data",))
    other = optax.adam(0.1).init({"w": jnp.zeros(5)})
    with pytest.raises(ValueError, match=r"adam_state has shape \(5,\) for the parameter \['w'\]"):
        onebit_jax.from_adam(other, tx, params, mesh)


@pytest.mark.parametrize("name", ["injected", "decay"])
def test_schedules_go_on_where_adam_was(name):
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    tx = {
        "injected": optax.inject_hyperparams(lambda rate: falling(rate, **FROZEN))(rate=schedule),
        "decay": falling(1e-3, weight_decay=schedule, **FROZEN),
    }[name]

    def counts(state):
        leaves, keystr = jax.tree_util.tree_leaves_with_path(state), jax.tree_util.keystr
        return [int(x) for path, x in leaves if keystr(path).endswith(".count")]

    state = onebit_jax.from_adam(adam_state(5), tx, make_params(), MESH)
    assert len(counts(state)) >= 2
    assert {*counts(state)} == {5}
    step, _ = small_task.start(tx)
    _, state = small_task.train(step, make_params(), state, make_batches(1))
    assert {*counts(state)} == {6}
    if name == "injected":
        np.testing.assert_allclose(state.hyperparams["rate"], schedule(5))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 6])
@pytest.mark.parametrize("options", [{"b2": 0.9}, {"eps": 1e-2}, {"injected": 0.9}], ids=str)
def test_the_variance_is_that_of_adam_whatever_the_options(options, steps):
    """The batch is always the same, and the rate 0: the variance is g^2 but for the rounding."""
    if "injected" in options:
        make = lambda b2: falling(0.0, **FROZEN, b2=b2)  # noqa: E731
        tx = optax.inject_hyperparams(make)(b2=options["injected"])
    else:
        tx = falling(0.0, **FROZEN, **options)
    step, (params, state) = small_task.start(tx)
    batches = make_batches(1) * steps
    grads = jax.grad(small_task.loss_fn)(params, batches[0])
    params, state = small_task.train(step, params, state, batches)
    adam = onebit_jax.to_adam(state, tx, params, MESH)
    b2 = options.get("b2", options.get("injected", 0.999))
    squared = jax.tree.map(lambda v: np.asarray(v) / (1 - b2**steps), adam.nu)
    for x, g in zip(jax.tree.leaves(squared), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(x, np.square(g), rtol=2e-3, atol=1e-9)
