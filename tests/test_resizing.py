"""States taken to other numbers of workers: nothing of what is owed is lost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms import momentum as moments
from tests import workers
from tests.optimizers import FROZEN, OPTIMIZERS
from tests.residuals import total_residual
from tests.runs import axis_of, mesh_of
from tests.small_task import make_mesh
from tests.workers import (
    AXIS,
    assert_workers_agree,
    draw,
    find_state,
    mesh_view,
    on_workers,
    replicate,
    with_rows,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Tensors that are padded, and one that is not; an empty one.
SHAPES = {"matrix": (64, 5), "odd": (37,), "empty": (0, 2), "scalar": ()}
STEPS = 6
SIZES = [(8, 4), (4, 8), (4, 3), ((2, 4), (4, 2)), (8, (2, 4)), ((2, 4), 3), (4, 1)]
names = functools.partial(pytest.mark.parametrize, ("before", "after"))


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
    return onebit_jax.resize(state, tx, params, mesh, from_axes=axes(before), from_tx=from_tx)


def gradients(seed, sizes, scale=1.0):
    """Of each worker, around a mean that differs from element to element."""
    drawn = draw(seed, mesh_of(sizes).size, STEPS, shapes=SHAPES)
    offset = draw(99, shapes=SHAPES)
    return jax.tree.map(lambda x, y: scale * (x + y), drawn, offset)


def nodes_of(sizes):
    return sizes if isinstance(sizes, int) else sizes[0]


def residual_of(state, bits, sizes):
    """`mean_i e_i + E` of a state's exchange."""
    rows = with_rows(jax.device_get(state), mesh_of(sizes).size)
    how = ExchangeOptions().at_bits(axis_of(sizes), bits)
    return total_residual(how, rows, zeros(), sizes)


def assert_close(one, other, tolerance=1e-6):
    for name, expected in other.items():
        limit = tolerance * max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(one[name], expected, rtol=0, atol=limit, err_msg=name)


def zeros():
    return jax.tree.map(np.zeros, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def summed(updates):
    return jax.tree.map(lambda x: x.sum(0, dtype=np.float64), updates)


def mean_summed(grads):
    return jax.tree.map(lambda x: x.mean(0, dtype=np.float64).sum(0), grads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "before", "after"), [*((1, *sizes) for sizes in SIZES), (4, 4, 3), (8, 4, 3)]
)
def test_a_compressed_mean_loses_nothing_between_any_sizes(bits, before, after):
    """All that was given is in the updates, or owed: before, right after, and later on."""
    make = functools.partial(onebit_jax.compressed_mean, bits=bits)
    first, second = gradients(0, before), gradients(1, after)
    u, params, state = train(make, before, zeros(), first)
    expected = jax.tree.map(np.subtract, mean_summed(first), summed(u))
    owed = residual_of(state.exchange, bits, before)
    assert_close(owed, expected, 1e-5)
    assert bits > 1 or max(np.abs(x).max(initial=0) for x in owed.values()) > 0.5

    state = resized(make, before, after, state, params)
    assert_workers_agree(with_rows(jax.device_get(state), mesh_of(after).size))
    assert_close(residual_of(state.exchange, bits, after), owed, 1e-6)
    u, _, state = train(make, after, zeros(), second, state)
    expected = jax.tree.map(lambda r, g, x: r + g - x, expected, mean_summed(second), summed(u))
    assert_close(residual_of(state.exchange, bits, after), expected, 1e-5)


@pytest.mark.parametrize(
    ("bits", "before", "after"),
    [
        (1, 4, 3),
        pytest.param(1, 3, (2, 2), marks=pytest.mark.slow),
        (1, 2, 1),
        pytest.param(1, 1, 2, marks=pytest.mark.slow),
        (4, 3, 4),
    ],
)
def test_a_message_in_flight_is_not_lost(bits, before, after):
    """All that was given is in the updates, owed, or on its way."""
    make = functools.partial(onebit_jax.compressed_mean, bits=bits, delay=1)
    first, second = gradients(0, before), gradients(1, after)
    u, params, state = train(make, before, zeros(), first)
    expected = jax.tree.map(np.subtract, mean_summed(first), summed(u))
    assert_close(in_flight(state, bits, before), expected, 1e-5)
    state = resized(make, before, after, state, params)
    assert_close(in_flight(state, bits, after), expected, 1e-5)
    u, _, state = train(make, after, zeros(), second, state)
    expected = jax.tree.map(lambda r, g, x: r + g - x, expected, mean_summed(second), summed(u))
    assert_close(in_flight(state, bits, after), expected, 1e-5)


def in_flight(state, bits, sizes):
    """What the workers hold, sent in the next update or owed, and what the servers owe."""
    how = ExchangeOptions().at_bits(axis_of(sizes), bits)
    rows = with_rows(jax.device_get(state.in_flight), mesh_of(sizes).size)
    total = workers.on_workers(lambda x: how.over(zeros()).total_in_flight(x), sizes)(rows)
    return jax.tree.map(lambda x: x[0], jax.device_get(total))


def onebit_adam(axis_name, **options):
    options = FROZEN | options
    return onebit_jax.scale_by_onebit_adam(warmup=3, axis_name=axis_name, **options)


def onebit_lamb_published(axis_name):
    return onebit_jax.scale_by_onebit_lamb_published(warmup=3, axis_name=axis_name)


def total(state, sizes, fused=False, b1=0.9):
    """What the next update begins with: `b1 m + R`, in what the exchange is given."""
    kept = with_rows(jax.device_get(state.momentum), mesh_of(sizes).size)
    how = ExchangeOptions().one_bit(axis_of(sizes), fused=fused)
    R = total_residual(how, kept, zeros(), sizes)
    return jax.tree.map(lambda x, r: b1 * x + r, compressed(how, kept, sizes), R)


def compressed(how, kept, sizes):
    """The momentum that was received."""

    def decode(kept):
        exchange = how.over(zeros())
        return exchange.layout.scatter(moments.compressed(exchange, kept))

    return jax.tree.map(lambda x: x[0], on_workers(decode, sizes)(kept))


@pytest.mark.slow
@names([(8, 4), (4, 3), ((2, 4), (4, 2))])
@pytest.mark.parametrize(("make", "fused"), [(onebit_adam, False), (onebit_lamb_published, True)])
def test_it_goes_on_with_the_same_momentum(make, fused, before, after):
    """And once it has gone on, the sums of updates and of what is left are those of gradients."""
    start = draw(5, shapes=SHAPES)
    _, params, state = train(make, before, start, gradients(0, before))
    expected = total(state, before, fused)
    state = resized(make, before, after, state, params)
    assert_close(total(state, after, fused), expected)
    grads = gradients(1, after)
    first = jax.tree.map(lambda g: g[:, :1], grads)
    updates, _, state = train(make, after, start, first, state)
    # Mean and residuals after an update add up to what it began with and 0.1 g.
    scaled = jax.tree.map(lambda g: 0.1 * g.mean(0)[0], first)
    left = total(state, after, fused, b1=1.0)
    if not fused:
        assert_close(left, jax.tree.map(np.add, expected, scaled), 1e-5)
    updates, *_ = train(make, after, start, grads, state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"warmup_bits": 8}])
def test_a_warmup_goes_on_as_it_would_have(options):
    """Momentum and variance are kept; workers' gradients are alike, so that sizes do not tell."""

    def make(axis_name):
        own = FROZEN | options
        return onebit_jax.scale_by_onebit_adam(warmup=99, axis_name=axis_name, **own)

    alike = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), gradients(0, 4))
    fewer = jax.tree.map(lambda x: x[:2], alike)
    _, params, state = train(make, 4, zeros(), alike)
    expected, *_ = train(make, 4, zeros(), alike, state)
    state = resized(make, 4, 2, state, params)
    ours, *_ = train(make, 2, zeros(), fewer, state)
    assert_close(ours, expected, 0.05 if options else 1e-5)


@pytest.mark.slow
def test_float32_residuals_to_bfloat16():
    coarse = functools.partial(onebit_adam, exchange=ExchangeOptions(residual_dtype="bfloat16"))
    _, params, state = train(onebit_adam, 4, zeros(), gradients(0, 4, 0.1))
    expected = total(state, 4)
    moved = resized(coarse, 4, 4, state, params, make_from=onebit_adam)
    held = jax.tree.leaves(moved.momentum.m_then_compensated)
    assert {x.dtype for x in held} == {jnp.dtype("bfloat16")}
    assert_close(total(moved, 4), expected, 2**-8)


@pytest.mark.slow
def test_one_bit_to_eight():
    make = functools.partial(onebit_jax.compressed_mean, bits=8)
    _, params, state = train(onebit_jax.compressed_mean, 4, zeros(), gradients(0, 4))
    owed = residual_of(state.exchange, 1, 4)
    moved = resized(make, 4, 2, state, params, make_from=onebit_jax.compressed_mean)
    assert_close(residual_of(moved.exchange, 8, 2), owed)


def per_worker_means(state):
    """The mean over workers of every float that each has for itself, in order."""
    nodes = filter(is_per_worker, jax.tree.leaves(jax.device_get(state), is_leaf=is_per_worker))
    leaves = [x for node in nodes for x in jax.tree.leaves(node)]
    return [x.mean(0) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


@pytest.mark.slow
@names([(4, 3), ((2, 4), (4, 2))])
def test_what_was_left_out_is_neither_owed_nor_forgotten(before, after):
    def make(axis_name):
        mean = onebit_jax.compressed_mean(axis_name)
        return onebit_jax.skip_nonfinite(mean, axis_name)

    grads = gradients(0, before)
    faulty = jax.tree.map(np.copy, grads)
    faulty["odd"][1, 3, 7] = np.nan
    u, params, state = train(make, before, zeros(), faulty)
    made = jax.tree.map(lambda x: np.delete(x, 3, axis=1), grads)
    owed = jax.tree.map(np.subtract, mean_summed(made), summed(u))
    assert_close(residual_of(state.inner_state.exchange, 1, before), owed, 1e-5)

    state = resized(make, before, after, state, params)
    assert_close(residual_of(state.inner_state.exchange, 1, after), owed, 1e-5)
    _, _, state = train(make, after, zeros(), gradients(1, after), state)
    assert (state.skips.steps, state.skips.skipped, state.skips.worker) == (2 * STEPS, 1, 1)


@pytest.mark.parametrize(
    "name", ["signum", "distributed_lion", pytest.param("zero_one_adam", marks=pytest.mark.slow)]
)
def test_momenta_are_averaged(name):
    make = OPTIMIZERS[name].make
    _, params, state = train(make, 4, draw(7, shapes=SHAPES), gradients(0, 4))
    moved = resized(make, 4, 3, state, params)
    if name == "zero_one_adam":  # without what its exchange has
        moved, state = ((x.m, x.accumulated) for x in (moved, state))
    # Padding apart, whose pieces depend on the number of workers.
    for x, y in zip(per_worker_means(moved), per_worker_means(state), strict=True):
        np.testing.assert_allclose(x[x != 0], y[y != 0], atol=1e-6)


@pytest.mark.slow
@names([(8, 4), ((2, 4), (4, 2)), ((2, 4), 3)])
def test_birders_averages_are_averaged(before, after):
    """|m| <= a, and inactive elements stay so."""
    make = OPTIMIZERS["birder"].make
    grads = jax.tree.map(np.copy, gradients(0, before))
    grads["odd"][..., :5] = 0
    _, params, state = train(make, before, zeros(), grads)
    moved = jax.device_get(resized(make, before, after, state, params))
    ours, theirs = (find_state(onebit_jax.ScaleByBirderState, s) for s in (moved, state))
    for m, a in zip(jax.tree.leaves(ours.m), jax.tree.leaves(ours.a), strict=True):
        assert np.all(np.abs(m) <= a)
    # Whatever pieces they are in, their sums are those of the workers' means.
    for x, y in ((ours.m, theirs.m), (ours.a, theirs.a)):
        sums = [
            sum(piece.sum(dtype=np.float64) for piece in jax.tree.leaves(tree)) / nodes_of(sizes)
            for tree, sizes in ((x, after), (y, before))
        ]
        np.testing.assert_allclose(*sums, rtol=1e-4)
    updates, *_ = train(make, after, zeros(), gradients(1, after), moved)
    assert np.all(updates["odd"][0, :5] == 0)
    assert np.all(np.abs(updates["odd"][0, 5:]) > 0)


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
        with pytest.raises(ValueError, match=r"does not fit the gradients|first axis must be 1"):
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
    for n in (1, 2) if OPTIMIZERS[name].has_residuals else ():
        update(n, jax.tree.map(functools.partial(first, workers=n), state))


def test_what_does_not_fit_is_refused():
    params = zeros()
    _, rows, state = train(onebit_jax.compressed_mean, 4, params, gradients(0, 4))
    with pytest.raises(ValueError, match=r"onebit_jax\.resize needs the from_axes"):
        resized(onebit_jax.compressed_mean, 8, 4, state, rows)
    with pytest.raises(ValueError, match=r"the state has 1 optimizers with an exchange, .* 0"):
        resized(onebit_jax.mean_gradients, 4, 2, state, rows, make_from=onebit_jax.compressed_mean)


@pytest.mark.parametrize(("before", "swapped"), [((4, 1), (1, 4)), ((2, 4), (4, 2))])
def test_sizes_in_the_wrong_order_are_refused(before, swapped):
    params = zeros()
    tx = onebit_jax.compressed_mean(workers.PAIR)
    state = onebit_jax.init(tx, params, make_mesh(before, workers.PAIR))
    to = make_mesh((2, 2), workers.PAIR)
    with pytest.raises(ValueError, match="opt_state is not a state of this optimizer"):
        onebit_jax.resize(state, tx, params, to, from_axes=axes(swapped))
    onebit_jax.resize(state, tx, params, to, from_axes=axes(before))


@pytest.mark.slow
def test_from_adam_into_compression_and_back():
    """One more dense update is Adam's own; then what is compressed goes on from its moments."""
    mesh = make_mesh((4,), (AXIS,))
    rate = optax.linear_schedule(0.1, 0.0, 50)
    dense = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(rate))
    tx = onebit_jax.onebit_adam(rate, weight_decay=1e-4, warmup=STEPS, axis_name=AXIS, **FROZEN)
    _, params, adam_state = train(lambda _: dense, 4, draw(3, shapes=SHAPES), gradients(0, 4))
    state = onebit_jax.from_adam(adam_state, tx, params, mesh)
    second = gradients(1, 4)
    expected, *_ = train(lambda _: dense, 4, params, second, adam_state)
    ours, _, state = train(lambda _: tx, 4, params, second, state)
    one, other = (jax.tree.map(lambda x: x[0], u) for u in (ours, expected))
    assert_close(one, other, 1e-6)
    assert int(find_state(onebit_jax.ScaleByOnebitAdamState, state).progress.frozen_at) == STEPS + 1

    onebit = find_state(onebit_jax.ScaleByOnebitAdamState, state)
    mean = 0.9 * onebit_means(state)["odd"]
    adam: Any = onebit_jax.to_adam(state, tx, params, mesh)
    assert int(adam.count) == 2 * STEPS
    kept = with_rows(jax.device_get(onebit.momentum), 4)
    owed = total_residual(ExchangeOptions().one_bit(AXIS), kept, zeros(), 4)["odd"]
    np.testing.assert_allclose(0.9 * adam.mu["odd"], mean + owed, atol=1e-6)
    frozen = 1 / (np.sqrt(adam.nu["odd"] / (1 - 0.999 ** (2 * STEPS))) + 1e-8)
    np.testing.assert_allclose(frozen, onebit.v_then_inverse_root["odd"], rtol=1e-4)


def onebit_means(state):
    kept = with_rows(find_state(onebit_jax.ScaleByOnebitAdamState, state).momentum, 4)
    return compressed(ExchangeOptions().one_bit(AXIS), kept, 4)


def test_from_adam_of_something_else():
    tx = onebit_jax.onebit_adam(0.1, warmup=1, axis_name=AXIS, **FROZEN)
    params = {"w": jnp.zeros(4)}
    with pytest.raises(ValueError, match="the state has 0 of ScaleByAdamState in it"):
        onebit_jax.from_adam(optax.sgd(0.1).init(params), tx, params, make_mesh((2,), (AXIS,)))
    other = optax.adam(0.1).init({"w": jnp.zeros(5)})
    with pytest.raises(ValueError, match="adam_state is of parameters of the shapes"):
        onebit_jax.from_adam(other, tx, params, make_mesh((2,), (AXIS,)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_state_comes_along(name):
    tx = OPTIMIZERS[name].make(AXIS)
    params = {"w": jnp.ones((6, 3)), "b": jnp.ones(3)}
    before, after = (make_mesh((n,), (AXIS,)) for n in (4, 2))
    state = onebit_jax.init(tx, params, before)
    moved = onebit_jax.resize(state, tx, params, after, from_axes=before)
    fresh = onebit_jax.init(tx, params, after)
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, fresh)


NO_TENSORS = {
    "Muon of matrices": lambda: onebit_jax.onebit_muon(1e-2, axis_name=AXIS),
    "Muon of matrices, late": lambda: onebit_jax.onebit_muon(1e-2, delay=1, axis_name=AXIS),
    "an unused group": lambda: optax.partition(
        {name: onebit_jax.onebit_adam(1e-2, axis_name=AXIS) for name in "ab"}, {"w": "a"}
    ),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_a_group_without_tensors_comes_along(name):
    tx, params = NO_TENSORS[name](), {"w": jnp.ones((6, 3))}
    before, after = (jax.sharding.AbstractMesh((n,), (AXIS,)) for n in (4, 2))
    state = onebit_jax.init(tx, params, before)
    step = onebit_jax.train_step(loss_of_rows, tx, before)
    params, state, _ = step(params, state, np.ones((4, 3), np.float32))
    moved = onebit_jax.resize(state, tx, params, after, from_axes=before)
    fresh = onebit_jax.init(tx, params, after)
    assert jax.tree.structure(moved) == jax.tree.structure(fresh)
    step = onebit_jax.train_step(loss_of_rows, tx, after)
    step(params, moved, np.ones((4, 3), np.float32))


def loss_of_rows(params, batch):
    return jnp.mean((batch @ params["w"].T - 1) ** 2)
