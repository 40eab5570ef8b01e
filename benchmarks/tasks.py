"""What the benchmarks train: parameters, a loss, and a batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from train.bert.data import max_predictions
from train.bert.model import BertConfig, init_params, pretraining_loss

Tree = Literal["matrices", "bert-tiny", "bert-mini", "bert-small", "bert-base", "bert-large"]

MATRICES = 16
_VOCABULARY = 30522
# Of the batch that one worker gets of a pre-training task.
_SEQUENCES, _TOKENS = 8, 64


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


def of_tree(tree: Tree, elements: int, *, pretraining: bool = False) -> Task:
    """The task of this name.

    Args:
      tree: `MATRICES` matrices, or the parameters of a BERT.
      elements: of the matrices together, a power of two.
      pretraining: whether the loss is BERT's own, forward and backward pass; else it is trivial.

    Raises:
      ValueError: for `elements` that cannot be cut into matrices, and for matrices to pre-train.
    """
    if tree == "matrices":
        if pretraining:
            bert = ", ".join(name for name in get_args(Tree) if name != tree)
            raise ValueError(f"tree={tree!r} has no loss of pre-training; give one of {bert}.")
        return trivial(matrices(elements, MATRICES))
    model = BertConfig.of_size(tree.removeprefix("bert-"), _VOCABULARY)
    make_params = functools.partial(init_params, model, seed=0)
    if not pretraining:
        return trivial(jax.eval_shape(make_params))
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
