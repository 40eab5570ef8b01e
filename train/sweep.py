"""Trying learning rates."""

import math
from collections.abc import Callable, Sequence


def sweep(
    first: Sequence[float], widen: int, heldout: Callable[[float], float]
) -> dict[float, float]:
    """Tries learning rates, and more of them while the best is the lowest or the highest.

    Args:
        first: the learning rates to try in any case.
        widen: how many more at most; each is twice the highest, or half of the lowest.
        heldout: makes a training; its loss, infinite where it diverged.

    Returns:
        The losses by learning rate, in rising order.
    """
    losses = {rate: heldout(rate) for rate in sorted(first)}
    for _ in range(widen):
        best, lowest, highest = min(losses, key=losses.__getitem__), min(losses), max(losses)
        if best not in (lowest, highest):
            break
        rate = lowest / 2 if best == lowest else 2 * highest
        losses[rate] = heldout(rate)
    return dict(sorted(losses.items()))


def or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def or_infinite(value: float | None) -> float:
    """A loss of a record, infinite where the training diverged."""
    return math.inf if value is None or math.isnan(value) else value
