"""The held-out loss of a language model."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax


def heldout_losses(
    loss_fn: Callable[[Any, Any], tuple[jax.Array, Any]], params: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """The mean loss of a held-out byte, in nats and in bits, and how many bytes there were.

    Args:
        loss_fn: from `next_token_loss`, jitted.
        params: the model's parameters.
        batches: from `data.evaluation_batches`.
    """
    total, count = 0.0, 0
    for batch in batches:
        size = batch["targets"].size
        total += size * float(loss_fn(params, batch)[0])
        count += size
    loss = total / count
    return {
        "heldout_loss": loss,
        "heldout_bits_per_byte": loss / math.log(2),
        "heldout_bytes": count,
    }
