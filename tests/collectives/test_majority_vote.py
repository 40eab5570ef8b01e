"""Local steps whose outer gradient is voted on: GeoMesh, against NumPy."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import onebit_jax
from tests import reference
from tests.collectives.exchanging import averaged
from tests.workers import AXIS, assert_workers_agree, draw, on_workers

SHAPES: dict[str, Any] = {"large": (300, 11), "one": [(), (0,)], "even": (64, 3), "small": (9,)}
WORKERS, EVERY, UPDATES = 4, 3, 10
INNER = optax.lion(0.02)


def make_tx(axis_name: Any, inner: Any = INNER) -> Any:
    return onebit_jax.local_steps(
        inner,
        optax.sgd(0.3, momentum=0.9, nesterov=True),
        every=EVERY,
        axis_name=axis_name,
        compressor=onebit_jax.MajorityVote(),
    )


def zeros(*leading) -> Any:
    return jax.tree.map(
        lambda shape: np.zeros((*leading, *shape), np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def trained(tx: Any, gradients: Any, weights: Any = None, binding: Any = "vmap") -> list[Any]:
    """The shared parameters after each update, a row per worker; votes have these weights."""

    def update(g: Any, state: Any, params: Any, weight: Any) -> Any:
        extra = {} if weights is None else {"vote_weight": weight}
        return tx.update(g, state, params, **extra)

    given = np.ones(WORKERS) if weights is None else np.asarray(weights)
    state, params = on_workers(tx.init, WORKERS)(zeros(WORKERS)), zeros(WORKERS)
    made, seen = on_workers(update, WORKERS, binding), []
    for t in range(UPDATES):
        updates, state = made(jax.tree.map(lambda g, t=t: g[t], gradients), state, params, given)
        params = optax.apply_updates(params, updates)
        seen.append(jax.device_get(state.shared))
    assert_workers_agree((seen, state.exchange))
    return seen


@pytest.mark.parametrize(
    ("weights", "binding"), [(None, "vmap"), ([1, 5, 2, 3.5], "shard_map"), ([0, 0, 7, 0], "vmap")]
)
def test_it_follows_numpy(weights, binding):
    gradients = draw(0, UPDATES, WORKERS, shapes=SHAPES)
    gradients["small"][..., 2] = 0  # nobody moves it: zeros take turns, and move it back
    seen = trained(make_tx(AXIS), gradients, weights, binding)

    def by_hand(*tensors: Any) -> list[np.ndarray]:
        """One tensor: what Lion does is elementwise."""
        g, tensor = tensors[0], reference.GeoMesh(np.zeros(tensors[0].shape[2:], np.float32))
        own, history = np.zeros(g.shape[1:], np.float32), []
        state = INNER.init(own)
        for t in range(UPDATES):
            steps, state = INNER.update(g[t], state, own)
            own = np.asarray(optax.apply_updates(own, steps))
            if (t + 1) % EVERY == 0 and g[t].size:
                shared = tensor.exchange(own, np.ones(WORKERS) if weights is None else weights)
                own = np.broadcast_to(shared, own.shape)
            history.append(tensor.x)
        return history

    expected = jax.tree.map(by_hand, gradients)
    for t, shared in enumerate(seen):
        at = jax.tree.map(lambda h, t=t: h[t], expected, is_leaf=_is_history)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[0], y, atol=2e-6), shared, at)
    assert np.any(seen[-1]["large"])


def _is_history(node: Any) -> bool:
    return isinstance(node, list) and len(node) == UPDATES


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_nodes_vote_and_one_node_averages(sizes):
    """A shard's magnitudes are those of its own elements; padding takes no part."""
    values = draw(1, WORKERS, shapes={"w": (50,)})
    got = averaged(onebit_jax.MajorityVote(), values, sizes)["w"]
    nodes, per_node = sizes
    means = values["w"].reshape(nodes, per_node, -1).mean(1)
    expected = means[0]
    if nodes > 1:
        v = reference.vote_sign(np.sum([reference.vote_sign(x, True) for x in means], 0), True)
        held = 8 * nodes * -(-50 // (8 * WORKERS))
        for start in range(0, 50, held):
            own = slice(start, start + held)
            expected[own] = np.mean([np.abs(x[own]).mean() for x in means]) * v[own]
    np.testing.assert_allclose(got[0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "vote"}, r"^compressor='vote' must be a compressor, such as"),
        ({"compressor": onebit_jax.MajorityVote}, r"^compressor=<class.* must be a compressor"),
        ({"bits": 4}, r"^bits=4 and compressor=MajorityVote.* exclude each other: give one"),
        (
            {"exchange": onebit_jax.ExchangeOptions(form="one-stage")},
            r"^form='one-stage' is not a form of MajorityVote.*has 'two-stage' only",
        ),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options, message):
    options = {"compressor": onebit_jax.MajorityVote()} | options
    with pytest.raises(ValueError, match=message):
        onebit_jax.compressed_mean(AXIS, **options)
    with pytest.raises(ValueError, match=message):
        onebit_jax.local_steps(INNER, optax.sgd(1.0), every=2, axis_name=AXIS, **options)
