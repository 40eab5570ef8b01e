"""Held-out loss and accuracy of a residual network."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.resnet.model import ResNetConfig, apply


class Judge:
    """Says how a model does on held-out images; compiled once.

    Args:
        config: the model's shape.
    """

    def __init__(self, config: ResNetConfig):
        def sums(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, ...]:
            logits, _ = apply(config, params, statistics, batch["image"], train=False)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            right = logits.argmax(-1) == batch["label"]
            counts = batch["counts"]
            return jnp.where(counts, losses, 0).sum(), (right & counts).sum(), counts.sum()

        self._sums = jax.jit(sums)

    def __call__(self, params: Any, batches: Iterable[Any], model_state: Any) -> dict[str, float]:
        """The mean loss in nats, the share that is right, and how many there were.

        Args:
            params: the model's parameters.
            batches: from `train.stream.in_order`.
            model_state: the batch norms' statistics.
        """
        loss, right, count = 0.0, 0, 0
        for batch in batches:
            of_batch = self._sums(params, model_state, batch)
            loss += float(of_batch[0])
            right += int(of_batch[1])
            count += int(of_batch[2])
        return {
            "heldout_loss": loss / count,
            "heldout_accuracy": right / count,
            "heldout_images": count,
        }
