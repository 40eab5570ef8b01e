"""Runs of an optimizer on workers that one device simulates, for the tests of several."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from tests.workers import AXIS, PAIR, on_workers, replicate

Sizes = int | tuple[int, int]


def axis_of(sizes: Sizes) -> str | tuple[str, str]:
    """What an optimizer for these workers is told."""
    return AXIS if isinstance(sizes, int) else PAIR


def mesh_of(sizes: Sizes) -> AbstractMesh:
    """The mesh that they lie on, for its size and the names of its axes."""
    axes, form = ((AXIS,), (sizes,)) if isinstance(sizes, int) else (PAIR, sizes)
    return AbstractMesh(form, axes, axis_types=(AxisType.Auto,) * len(axes))


def trainer(make: Callable[..., Any], sizes: Sizes) -> Callable[..., tuple[Any, Any]]:
    """Makes of parameters, of gradients `[workers, updates, ...]`, and of what the optimizer is to
    be made of, the last state, and the parameters after each update, `[workers, updates, ...]`.
    """

    def worker(params: Any, gradients: Any, of: Any) -> Any:
        tx = make(*of)

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), history = lax.scan(step, (params, tx.init(params)), gradients)
        return state, history

    mapped, workers = on_workers(worker, sizes), mesh_of(sizes).size

    def train(params: Any, gradients: Any, *of: Any) -> tuple[Any, Any]:
        params, of = replicate((params, tuple(map(jnp.asarray, of))), workers)
        return mapped(params, gradients, of)

    return train
