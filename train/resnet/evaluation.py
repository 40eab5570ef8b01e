"""Held-out loss and accuracy of a residual network."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.resnet.model import ResNetConfig, apply


def judge(config: ResNetConfig) -> Callable[..., dict[str, float]]:
    """The function `(params, batches, model_state)` that says how a model does; compiled once.

    It gives the mean loss in nats, the share that is right, and how many images there were, given
    the batches of `train.stream.in_order` and the batch norms' statistics.
    """

    @jax.jit
    def sums(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, ...]:
        logits, _ = apply(config, params, statistics, batch["image"], train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right, counts = logits.argmax(-1) == batch["label"], batch["counts"]
        return jnp.where(counts, losses, 0).sum(), (right & counts).sum(), counts.sum()

    def judged(params: Any, batches: Iterable[Any], model_state: Any) -> dict[str, float]:
        of_batches = [jax.device_get(sums(params, model_state, batch)) for batch in batches]
        loss, right, count = np.asarray(of_batches, np.float64).sum(0)
        return {
            "heldout_loss": float(loss / count),
            "heldout_accuracy": float(right / count),
            "heldout_images": int(count),
        }

    return judged
