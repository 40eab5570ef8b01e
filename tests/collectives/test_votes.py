"""Votes on signs against whole numbers, and on local steps' outer gradients against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.collectives.votes import Votes, count_rows
from onebit_jax.contrib import MajorityVote
from tests import reference
from tests.collectives.exchanging import Exchanging
from tests.runs import axis_of
from tests.workers import AXIS, assert_workers_agree, draw, on_workers


@pytest.mark.parametrize("workers", [1, 3, 16, 255])
def test_votes_of_rows_are_counted_in_binary(workers):
    rows = np.random.default_rng(workers).integers(0, 256, (workers, 2, 5), np.uint8)
    rows[..., 0] = 255  # all workers' votes
    digits = np.asarray(count_rows(jnp.asarray(rows)))
    bits = np.unpackbits(digits[..., None], axis=-1, bitorder="little")
    counts = np.tensordot(2 ** np.arange(len(bits)), bits, 1)
    expected = np.unpackbits(rows[..., None], axis=-1, bitorder="little").sum(0, dtype=np.int64)
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
    ("mean", "sizes"),
    [(False, 1), (False, 3), (False, 8), (False, (2, 2)), (True, 2), (True, (3, 2))],
    ids=str,
)
def test_votes_are_counted_exactly(mean, sizes):
    shapes = [(9,), (0,), (4, 16)]
    exchange = Exchanging(Votes(mean), shapes, sizes)
    rng, per_node = np.random.default_rng(0), 1 if isinstance(sizes, int) else sizes[1]
    # A third are zeros of either sign, so that ties and zeros are common.
    of = np.array([-1, 1, 0, -0.0], np.float32)
    values = [rng.choice(of, (exchange.workers, *x), p=[0.4, 0.3, 0.2, 0.1]) for x in shapes]
    for turn in (0, 1):
        results = exchange(values, turn=turn)
        assert_workers_agree(results)
        for z, ours in zip(values, results, strict=True):
            nodes = z.reshape(exchange.workers // per_node, per_node, *z.shape[1:]).sum(1)
            expected = reference.sum_of_votes(nodes, turn)
            if mean:
                np.testing.assert_allclose(ours[0], expected / len(nodes), rtol=2e-7, atol=0)
            else:
                majority = reference.vote_sign(expected, turn % 2 == 0)
                np.testing.assert_array_equal(ours[0], majority)


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("mean", [False, True], ids=["majority", "mean"])
def test_zeros_and_ties_add_up_to_nothing(mean, workers):
    """They take turns. Half the votes of an even number of workers have a mean of exactly 0."""
    exchange = Exchanging(Votes(mean), [(9,)], workers)
    divided = np.broadcast_to(np.float32(-1) ** np.arange(workers)[:, None], (workers, 9))
    for values in (np.zeros((workers, 9), np.float32), divided)[: 2 - workers % 2]:
        turns = [exchange([values], turn=turn)[0][0] for turn in range(4)]
        assert not np.any(sum(turns))
        np.testing.assert_array_equal(turns[0], -turns[1])
        size = 1 if not mean else workers % 2 / workers
        np.testing.assert_allclose(np.abs(turns[0]), size, rtol=1e-6)


# Votes on outer gradients of local steps: GeoMesh.

SHAPES: dict[str, Any] = {"large": (300, 11), "one": [(), (0,)], "even": (64, 3), "small": (9,)}
WORKERS, EVERY, UPDATES = 4, 3, 10
INNER = optax.lion(0.02)


def zeros(*leading) -> Any:
    return jax.tree.map(
        lambda shape: np.zeros((*leading, *shape), np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.parametrize(
    ("weights", "binding"), [(None, "shard_map"), ([1, 5, 2, 3.5], "vmap"), ([0, 0, 7, 0], "vmap")]
)
def test_geomesh_follows_numpy(weights, binding):
    outer = optax.sgd(0.3, momentum=0.9, nesterov=True)
    tx: Any = onebit_jax.local_steps(
        INNER, outer, every=EVERY, axis_name=AXIS, compressor=MajorityVote()
    )
    gradients = draw(0, UPDATES, WORKERS, shapes=SHAPES)
    gradients["small"][..., 2] = 0  # nobody moves it: zeros take turns, and move it back

    def update(g: Any, state: Any, params: Any, weight: Any) -> Any:
        extra = {} if weights is None else {"vote_weight": weight}
        updates, state = tx.update(g, state, params, **extra)
        return optax.apply_updates(params, updates), state

    given = np.ones(WORKERS) if weights is None else np.asarray(weights)
    state, params = on_workers(tx.init, WORKERS)(zeros(WORKERS)), zeros(WORKERS)
    made, seen = on_workers(update, WORKERS, binding), []
    for t in range(UPDATES):
        own = jax.tree.map(lambda g, t=t: g[t], gradients)
        params, state = made(own, state, params, given)
        seen.append(jax.device_get(state.shared))
    assert_workers_agree(seen)

    def by_hand(*tensors: Any) -> list[np.ndarray]:
        """One tensor: what Lion does is elementwise."""
        g, tensor = tensors[0], reference.GeoMesh(np.zeros(tensors[0].shape[2:], np.float32))
        own, history = np.zeros(g.shape[1:], np.float32), []
        state = INNER.init(own)
        for t in range(UPDATES):
            steps, state = INNER.update(g[t], state, own)
            own = np.asarray(optax.apply_updates(own, steps))
            if (t + 1) % EVERY == 0 and g[t].size:
                own = np.broadcast_to(tensor.exchange(own, given), own.shape)
            history.append(tensor.x)
        return history

    expected = jax.tree.map(by_hand, gradients)
    for t, shared in enumerate(seen):
        at = jax.tree.map(
            lambda h, t=t: h[t],
            expected,
            is_leaf=lambda x: isinstance(x, list) and len(x) == UPDATES,
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, atol=2e-6), shared, at)
    assert np.any(seen[-1]["large"])


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_nodes_vote_and_one_node_averages(sizes):
    """A shard's magnitudes are those of its own elements; padding takes no part."""
    tx = onebit_jax.compressed_mean(axis_of(sizes), compressor=MajorityVote())
    values = draw(1, WORKERS, shapes={"w": (50,)})
    got = on_workers(lambda g: tx.update(g, tx.init(g))[0], sizes)(values)["w"]
    nodes, per_node = sizes
    means = values["w"].reshape(nodes, per_node, -1).mean(1)
    expected = means[0]
    if nodes > 1:
        v = reference.vote_sign(np.sum([reference.vote_sign(x, True) for x in means], 0), True)
        held = 8 * nodes * -(-50 // (8 * WORKERS))
        for start in range(0, 50, held):
            own = slice(start, start + held)
            expected[own] = np.mean([np.abs(x[own]).mean() for x in means]) * v[own]
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-5)


@pytest.mark.parametrize("sizes", [WORKERS, (2, 2)])
@pytest.mark.parametrize("weights", [[10, 1, 1, 1], [1, 10, 5, 5]])
def test_one_vector_may_hold_all_weights(sizes, weights):
    """A node's weight is the sum of its devices'."""
    tx: Any = onebit_jax.compressed_mean(axis_of(sizes), compressor=MajorityVote())
    signs = np.array([1, -1, -1, -1] if sizes == WORKERS else [1, 1, -1, -1], np.float32)

    def vote(g, own, together):
        return [tx.update(g, tx.init(g), vote_weight=weight)[0] for weight in (own, together)]

    grads = np.repeat(signs[:, None], 40, 1)
    together = np.tile(np.float32(weights), (WORKERS, 1))
    for result in on_workers(vote, sizes)(grads, np.float32(weights), together):
        np.testing.assert_array_equal(
            result, np.full((WORKERS, 40), np.sign(np.dot(signs, weights)))
        )


def test_weights_of_another_number_of_workers_are_refused():
    tx: Any = onebit_jax.compressed_mean(AXIS, compressor=MajorityVote())
    vote = on_workers(lambda g: tx.update(g, tx.init(g), vote_weight=np.ones(3))[0], WORKERS)
    with pytest.raises(ValueError, match=r"^vote_weight has shape \(3,\), but .* of the 4 workers"):
        vote(np.ones((WORKERS, 8), np.float32))
