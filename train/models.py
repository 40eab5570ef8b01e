"""What all models have in common: named sizes, and modules as functions of plain nested dicts."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]
Statistics = dict[str, Any]
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
# A loss as `onebit_jax.train_step` takes it; and one of a model with batch norms' statistics.
Loss = Callable[[Params, Batch], tuple[jax.Array, Metrics]]
StatefulLosses = tuple[jax.Array, Metrics, Statistics]
StatefulLoss = Callable[[Params, Batch, Statistics], StatefulLosses]

Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a model, and how it is computed; each model has a subclass.

    Attributes:
        SIZES: the first fields of each named size.
        bfloat16: whether to compute in bfloat16.
        remat: whether to compute each block again for its gradients, which takes less memory.
    """

    SIZES: ClassVar[Mapping[str, tuple[Any, ...]]]

    bfloat16: bool = dataclasses.field(default=False, kw_only=True)
    remat: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def of_size(cls, size: str, *fields: Any, **options: Any) -> Self:
        """A named size, with the fields after its own."""
        return cls(*cls.SIZES[size], *fields, **options)

    @property
    def dtype(self) -> Any:
        """What matrices are multiplied, and images convolved, in."""
        return jnp.bfloat16 if self.bfloat16 else jnp.float32


class Dropout(nnx.Module):
    """Dropout where there are generators of random numbers."""

    def __init__(self, rate: float):
        self.dropout = nnx.Dropout(rate)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """Any shape, to the same."""
        return self.dropout(x, deterministic=rngs is None, rngs=rngs)


def dropout_rngs(batch: Batch) -> nnx.Rngs:
    """The generators of dropout's masks, which follow from the batch's first `example_seed`.

    So they are the same however the run is cut into processes or resumed.
    """
    return nnx.Rngs(dropout=jax.random.key(batch["example_seed"][0]))


def split(model: nnx.Module) -> tuple[Params, Statistics]:
    """A network's parameters, and the running means and variances of its batch norms."""
    return (
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    )


def merge(make: Callable[[nnx.Rngs], Model], *states: Params | Statistics) -> Model:
    """The network that `make` makes, with these parameters, and statistics where it has them."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0)))), *states)


def draw_params(make: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Params:
    """The parameters of the network that `make` makes, float32, drawn from `seed`."""
    return split(make(nnx.Rngs(params=jax.random.key(seed))))[0]


def decay_mask(params: Params) -> Params:
    """Which parameters weight decay acts on: kernels and embeddings, not biases and norms."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)
