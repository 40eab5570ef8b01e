"""BERT with the heads of its fine-tuning tasks: a sentence's class, and an answer's span."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from train.bert.model import (
    INIT_STDDEV,
    Batch,
    BertConfig,
    Encoder,
    Losses,
    Params,
    cross_entropy,
)
from train.bert.weights import Pretrained


def _head(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = jax.nn.initializers.truncated_normal(INIT_STDDEV)
    return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs)


class SequenceClassifier(Encoder):
    """Logits of a sentence or a pair of them, or a number, from the pooled first token."""

    def __init__(self, config: BertConfig, outputs: int, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = _head(config.hidden, outputs, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, outputs]`; dropout is on where `rngs` is given."""
        pooled = self.pool(
            self.encode(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], rngs)
        )
        return self.head(self.dropout(pooled, deterministic=rngs is None, rngs=rngs))


class SpanFinder(Encoder):
    """Logits of where an answer begins and where it ends, for every token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = _head(config.hidden, 2, rngs)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, S, 2]`, padding at the lowest number there is."""
        mask = batch["attention_mask"]
        hidden = self.encode(batch["input_ids"], batch["token_type_ids"], mask, rngs)
        logits = self.head(hidden)
        return jnp.where(mask[..., None] != 0, logits, jnp.finfo(logits.dtype).min)


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A model for a task, as functions of parameters that are a plain nested dict of arrays.

    Attributes:
        make: the module, from a generator of its parameters.
    """

    make: Callable[[nnx.Rngs], Any]

    def init(self, pretrained: Pretrained, seed: int) -> Params:
        """The pretrained parameters of the encoder, and what those lack drawn from `seed`."""
        params = nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=jax.random.key(seed)))))
        known = {name: part for name, part in pretrained.params.items() if name in params}
        return params | jax.tree.map(jnp.asarray, known)

    def apply(self, params: Params, batch: Batch, *, train: bool = False) -> jax.Array:
        """The model's output; dropout follows from the batch's first `example_seed`."""
        model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: self.make(nnx.Rngs(0)))), params)
        rngs = nnx.Rngs(dropout=jax.random.key(batch["example_seed"][0])) if train else None
        return model(batch, rngs)


def classification_loss(
    model: FineTuned, classes: int, *, train: bool = True
) -> Callable[[Params, Batch], tuple[jax.Array, Losses]]:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy; of no classes, mean square.

    `batch` has `input_ids`, `token_type_ids` and `attention_mask`, integers `[B, S]`;
    `example_seed`, uint32 `[B]`; and `labels` `[B]`, class numbers or float32.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Losses]:
        outputs = model.apply(params, batch, train=train)
        if classes:
            losses = cross_entropy(outputs, batch["labels"])
        else:
            losses = (outputs[:, 0] - batch["labels"]) ** 2
        return jnp.mean(losses), {}

    return loss_fn


def span_loss(
    model: FineTuned, *, train: bool = True
) -> Callable[[Params, Batch], tuple[jax.Array, Losses]]:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy of both ends of an answer.

    As for `classification_loss`, but with `starts` and `ends` `[B]`, positions in the sequence.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Losses]:
        logits = model.apply(params, batch, train=train)
        starts = cross_entropy(logits[..., 0], batch["starts"])
        ends = cross_entropy(logits[..., 1], batch["ends"])
        return jnp.mean(starts + ends) / 2, {}

    return loss_fn
