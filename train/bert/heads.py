"""BERT with the heads of its fine-tuning tasks: a sentence's class, and an answer's span."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from train import models
from train.bert.model import BertConfig, Encoder, linear
from train.bert.weights import Pretrained
from train.models import Batch, Dropout, Loss, Metrics, Params


class SequenceClassifier(Encoder):
    """Logits of a sentence or a pair of them, or a number, from the pooled first token."""

    def __init__(self, config: BertConfig, outputs: int, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = linear(config.hidden, outputs, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, outputs]`; dropout is on where `rngs` is given."""
        return self.head(self.dropout(self.pool(self.encode(batch, rngs)), rngs))


class SpanFinder(Encoder):
    """Logits of where an answer begins and where it ends, for every token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = linear(config.hidden, 2, rngs)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, S, 2]`, padding at the lowest number there is."""
        logits = self.head(self.encode(batch, rngs))
        visible = batch["attention_mask"][..., None] != 0
        return jnp.where(visible, logits, jnp.finfo(logits.dtype).min)


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A model for a task, as functions of parameters that are a plain nested dict of arrays.

    Attributes:
        make: the module, from a generator of its parameters.
    """

    make: Callable[[nnx.Rngs], Any]

    def init(self, pretrained: Pretrained, seed: int) -> Params:
        """The pretrained parameters of the encoder, and what those lack drawn from `seed`."""
        params = models.draw_params(self.make, seed)
        known = {name: part for name, part in pretrained.params.items() if name in params}
        return params | jax.tree.map(jnp.asarray, known)

    def apply(self, params: Params, batch: Batch, *, train: bool = False) -> jax.Array:
        """The model's output; dropout is on where it is trained."""
        model = models.merge(self.make, params)
        return model(batch, models.dropout_rngs(batch) if train else None)


def classification_loss(model: FineTuned, classes: int) -> Loss:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy; of no classes, mean square.

    `batch` has `input_ids`, `token_type_ids` and `attention_mask`, integers `[B, S]`;
    `example_seed`, uint32 `[B]`; and `labels` `[B]`, class numbers or float32.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        outputs = model.apply(params, batch, train=True)
        if classes:
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
        else:
            losses = (outputs[:, 0] - batch["labels"]) ** 2
        return jnp.mean(losses), {}

    return loss_fn


def span_loss(model: FineTuned) -> Loss:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy of both ends of an answer.

    As for `classification_loss`, but with `starts` and `ends` `[B]`, positions in the sequence.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = model.apply(params, batch, train=True)
        starts = optax.softmax_cross_entropy_with_integer_labels(logits[..., 0], batch["starts"])
        ends = optax.softmax_cross_entropy_with_integer_labels(logits[..., 1], batch["ends"])
        return jnp.mean(starts + ends) / 2, {}

    return loss_fn
