"""Networks with batch norms, as plain nested dicts of parameters and of statistics."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

Params = dict[str, Any]
Statistics = dict[str, Any]

Model = TypeVar("Model", bound=nnx.Module)


def split(model: nnx.Module) -> tuple[Params, Statistics]:
    """A network's parameters, and the running means and variances of its batch norms."""
    return (
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    )


def merge(make: Callable[[nnx.Rngs], Model], params: Params, statistics: Statistics) -> Model:
    """The network that `make` makes, with these parameters and statistics."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return nnx.merge(graphdef, params, statistics)


def decay_mask(params: Params) -> Params:
    """Which parameters weight decay acts on: the kernels, not biases and batch norms' scales."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)
