"""The held-out loss of a language model."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def heldout_losses(
    loss_fn: Callable[[Any, Any], tuple[Any, Any]],
    token_bytes: np.ndarray,
    params: Any,
    batches: Iterable[Any],
) -> dict[str, float]:
    """The mean loss of a held-out token in nats, and of a byte in bits; and their numbers.

    Losses of a byte can be compared between tokenizers, those of a token cannot.

    Args:
        loss_fn: from `next_token_loss`, without dropout, jitted.
        token_bytes: how many bytes each token stands for.
        params: the model's parameters.
        batches: from `data.evaluation_batches`.
    """
    # In a program, as a batch may lie on the devices of several processes.
    count_bytes = jax.jit(lambda targets: jnp.take(jnp.asarray(token_bytes), targets).sum())
    nats, tokens, text_bytes = 0.0, 0, 0
    for batch in batches:
        size = batch["targets"].size
        nats += size * float(loss_fn(params, batch)[0])
        tokens += size
        text_bytes += int(count_bytes(batch["targets"]))
    return {
        "heldout_loss": nats / tokens,
        "heldout_bits_per_byte": nats / text_bytes / math.log(2),
        "heldout_tokens": tokens,
        "heldout_bytes": text_bytes,
    }
