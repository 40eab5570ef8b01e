"""What the benchmarks train: parameters, a loss, and a batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.bert.data import max_predictions
from train.bert.model import BertConfig, init_params, pretraining_loss

Tree = Literal[
    "matrices", "bert-tiny", "bert-mini", "bert-small", "bert-base", "bert-large", "bert-base-gpt2"
]
Loss = Literal["matmuls", "trivial", "pretraining"]

MATRICES = 16
# BERT's, and GPT-2's, which is odd.
_VOCABULARY, _GPT2_VOCABULARY = 30522, 50257
# Of the batch that one worker gets of a pre-training task.
_SEQUENCES, _TOKENS = 8, 64
# Of the batch that one worker gets for `matmuls`.
_ROWS = 8


class Task(NamedTuple):
    """Something to train.

    Attributes:
      make_params: makes the parameters.
      loss_fn: the loss of a worker's share of the batch, a scalar.
      make_batch: makes the batch of so many workers.
    """

    make_params: Callable[[], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    make_batch: Callable[[int], Any]

    @property
    def shapes(self) -> Any:
        """Of the parameters."""
        return jax.eval_shape(self.make_params)


def matmuls(shapes: Any) -> Task:
    """A loss that costs little, but whose gradients matmuls make, as a model's.

    Each tensor, as a matrix of its last axis, is multiplied with a few rows of each worker's batch:
    its gradient is the product of the rows and of what came out, and so written to memory before an
    optimizer reads it. Gradients that are elementwise, as of :func:`trivial`, XLA makes anew
    wherever they are read.

    Args:
      shapes: of the parameters.
    """
    widest = max(_as_matrix(p)[0] for p in jax.tree.leaves(shapes))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for p in jax.tree.leaves(params):
            rows, columns = _as_matrix(p)
            y = x[:, :rows] @ p.reshape(rows, columns)
            total += jnp.sum(jnp.square(y - 1)) / y.size
        return total

    def make_batch(workers: int) -> jax.Array:
        return jax.random.normal(jax.random.key(1), (_ROWS * workers, widest)) / widest**0.5

    def make_params() -> Any:
        return jax.tree.map(lambda p: jnp.full(p.shape, 0.02, p.dtype), shapes)

    return Task(make_params, loss_fn, make_batch)


def _as_matrix(p: Any) -> tuple[int, int]:
    return (math.prod(p.shape[:-1]), p.shape[-1]) if p.shape else (1, 1)


def trivial(shapes: Any) -> Task:
    """A loss that costs hardly more than one pass over the parameters, ``x / 2 ||p||^2``.

    Its gradient ``x p`` is of full size and each worker's own: ``x`` is in the batch.

    Args:
      shapes: of the parameters.
    """

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        squares = [jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params)]
        return jnp.mean(x) / 2 * sum(squares, jnp.float32(0))

    return Task(
        lambda: jax.tree.map(lambda p: jnp.full(p.shape, 0.5, p.dtype), shapes), loss_fn, differing
    )


def differing(workers: int) -> jax.Array:
    """A number for each worker, of other signs for neighbours, whose mean is not 0."""
    return jnp.where(jnp.arange(workers) % 2 == 0, 1.0, jnp.float32(-0.5))


def matrices(elements: int, count: int = 1) -> Any:
    """The shapes of matrices that have so many elements between them.

    Args:
      elements: of all of them.
      count: how many; both are powers of two.

    Raises:
      ValueError: for `elements` that cannot be cut into so many.
    """
    if elements < count or elements.bit_count() != 1:
        raise ValueError(
            f"elements={elements} must be a power of two, at least {count}, such as {2**26}."
        )
    each = elements // count
    columns = 2 ** (each.bit_length() // 2)
    shape = jax.ShapeDtypeStruct((each // columns, columns), jnp.float32)
    return [shape] * count


def of_tree(tree: Tree, elements: int, loss: Loss = "matmuls", side: int | None = None) -> Task:
    """The task of this name.

    Args:
      tree: `MATRICES` matrices, or the parameters of a BERT, or of one with GPT-2's vocabulary.
      elements: of the matrices together, a power of two.
      loss: of matmuls, trivial, or BERT's own, forward and backward pass.
      side: rows and columns of square matrices, in place of `elements`.

    Raises:
      ValueError: for `elements` that cannot be cut into matrices.
    """
    make = matmuls if loss == "matmuls" else trivial
    if tree == "matrices":
        square = jax.ShapeDtypeStruct((side, side), jnp.float32) if side else None
        return make([square] * MATRICES if square else matrices(elements, MATRICES))
    vocabulary = _GPT2_VOCABULARY if tree.endswith("gpt2") else _VOCABULARY
    model = BertConfig.of_size(tree.removeprefix("bert-").removesuffix("-gpt2"), vocabulary)
    make_params = functools.partial(init_params, model, seed=0)
    if loss != "pretraining":
        return make(jax.eval_shape(make_params))
    loss_fn = pretraining_loss(model)
    return Task(make_params, lambda params, batch: loss_fn(params, batch)[0], _random_tokens)


def _random_tokens(workers: int) -> dict[str, np.ndarray]:
    """A batch of random tokens, in the schema of `train.bert.data`."""
    rng = np.random.default_rng(0)
    rows, masked = _SEQUENCES * workers, max_predictions(_TOKENS)
    return {
        "input_ids": rng.integers(5, _VOCABULARY, (rows, _TOKENS), dtype=np.int32),
        "token_type_ids": np.zeros((rows, _TOKENS), np.int32),
        "attention_mask": np.ones((rows, _TOKENS), np.int32),
        "masked_positions": rng.integers(1, _TOKENS, (rows, masked), dtype=np.int32),
        "masked_labels": rng.integers(5, _VOCABULARY, (rows, masked), dtype=np.int32),
        "masked_weights": np.ones((rows, masked), np.float32),
        "next_sentence_label": rng.integers(0, 2, rows, dtype=np.int32),
        "example_seed": rng.integers(0, 2**32, rows, dtype=np.uint32),
    }


def size(shapes: Any) -> int:
    """Number of elements."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
