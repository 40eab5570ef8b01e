"""The held-out losses of a BERT."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from train.bert.model import Losses


def heldout_losses(
    loss_fn: Callable[[Any, Any], tuple[Any, Losses]],
    params: Any,
    batches: Iterable[Mapping[str, Any]],
) -> dict[str, float]:
    """Mean held-out losses: of a masked token, and of a next-sentence label.

    Args:
        loss_fn: from `pretraining_loss`, without dropout, jitted.
        params: the model's parameters.
        batches: from `data.evaluation_batches`.
    """
    mlm_loss, nsp_loss, masked, count = 0.0, 0.0, 0.0, 0
    for batch in batches:
        _, losses = loss_fn(params, batch)
        weight = float(batch["masked_weights"].sum())
        mlm_loss += weight * float(losses["mlm_loss"])
        nsp_loss += float(losses["nsp_loss"])
        masked += weight
        count += 1
    return {
        "heldout_mlm_loss": mlm_loss / masked,
        "heldout_nsp_loss": nsp_loss / count,
        "heldout_masked_tokens": int(masked),
    }
