"""The ranges that a healthy run's figures stay in, and what to do about one that does not.

docs/checkpoints.md says where each range comes from.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from onebit_jax.transforms.schedules import least_shrinkage

Figures = Mapping[str, float]

# The threshold of `variance_stable` for judging a variance: the lowest that was
# tried. The usual 0.85 flagged a healthy run.
_STABLE = 0.8


class Range(NamedTuple):
    """A figure's healthy range.

    Attributes:
      figure: its name.
      is_healthy: takes the figure and the number of workers.
      words: what it means that the figure is outside its range, and what to do.
      applies: takes all figures of the same optimizer; whether this one means anything yet.
    """

    figure: str
    is_healthy: Callable[[float, int], bool]
    words: str
    applies: Callable[[Figures], bool] = lambda figures: True


def _is_frozen(figures: Figures) -> bool:
    return figures.get("frozen_at", -1) >= 0


def _froze_for_good(figures: Figures) -> bool:
    return _is_frozen(figures) and figures.get("variance_at", -1) <= figures["frozen_at"]


_LONGER = (
    "make the warm-up longer, end it by onebit_jax.variance_stable, or let the variance follow "
    "with variance_refreshes."
)

RANGES = (
    Range(
        "residual_ratio",
        lambda ratio, workers: ratio <= 50 * math.sqrt(workers),
        "what is still to be sent is more than 50 sqrt(workers) times what an exchange brings. "
        "Let all workers shuffle data together; or lower the learning rate, or take more bits.",
    ),
    Range(
        "workers_alike",
        lambda alike, workers: alike == 0,
        "all workers have sent the same numbers: gradients were averaged before the optimizer, or "
        "all have one batch. Give it each worker's own gradients. Right after a restore it means "
        "that all were given one worker's state, as by jax_utils.unreplicate, and those of the "
        "others are lost: save and restore the state with its axis of workers.",
    ),
    Range(
        "scale_spread",
        lambda spread, workers: spread <= 1e15,
        "one tensor's scale is more than 1e15 times another's, which has next to no gradient. Look "
        "for a part of the model that the loss does not reach, or that has saturated.",
    ),
    Range(
        "inactive_share",
        lambda share, workers: share <= 0.5,
        "more than half of the coordinates had no gradient before the variance froze, and stay "
        f"where they are. To train them, leave them dense by optax.partition, {_LONGER}",
        _is_frozen,
    ),
    Range(
        "ignored_share",
        lambda share, workers: share <= 0.01,
        "so much of this tensor had no gradient before the variance froze, and has one now, which "
        f"is ignored, as of layers unfrozen later. Train it densely by optax.partition, {_LONGER}",
        _froze_for_good,
    ),
    Range(
        "unmoved_share",
        lambda share, workers: share <= 0.9,
        "so many updates of this tensor are too small to change a number of its dtype, and round "
        "to nothing. Hold it in float32 (and compute in bfloat16), or raise the learning rate.",
    ),
    Range(
        "missing_updates",
        lambda share, workers: share <= 0.1,
        "the optimizer has made fewer updates than the run by this share of them: its state began "
        "anew beside restored parameters (use the state that a restore returns), or the loop "
        "itself skipped updates, as with Flax's DynamicScale.",
    ),
    Range(
        "variance_growth",
        lambda growth, workers: 0 < growth <= 1 / _STABLE,
        f"while updates doubled up to the freeze, variances grew by over {1 / _STABLE - 1:.0%}, "
        f"or it froze too soon to tell (0): steps may be too long. In the next run {_LONGER}",
        _froze_for_good,
    ),
    Range(
        "variance_shrinkage",
        lambda shrinkage, workers: shrinkage == 0 or shrinkage >= least_shrinkage(_STABLE),
        f"while updates doubled up to the freeze, variances shrank below "
        f"{least_shrinkage(_STABLE):.2f} of that: steps may be too short. Next time {_LONGER}",
        _froze_for_good,
    ),
    Range(
        "saturation",
        lambda share, workers: share <= 0.9,
        "of nine in ten coordinates all recent gradients had one sign, and bits are not random. "
        "Give every worker new batches; else take a higher learning rate or a larger b.",
        lambda figures: figures.get("updates", 0) >= 100,
    ),
    Range(
        "greatest_ratio",
        # A compiler may round m and a apart.
        lambda ratio, workers: ratio <= 1 + 1e-5,
        "|m| is above a, which no update of Birder makes: the state was changed from outside, or "
        "a device is faulty. Go back to a checkpoint that is whole.",
    ),
)


def warnings_of(figures: Figures, workers: int) -> tuple[str, ...]:
    """Describes the figures that are outside their ranges.

    Args:
      figures: by name, with labels in front if several optimizers report the same.
      workers: the number of workers.

    >>> [text] = warnings_of({"residual_ratio": 101.0, "adam/phase": 1.0}, workers=4)
    >>> text[:67]
    'residual_ratio=101: what is still to be sent is more than 50 sqrt(w'
    """
    found = [
        f"{name}={value}: it is not finite. Go back to a checkpoint from before, and look for the "
        f"first step whose loss or gradient is not."
        for name, value in figures.items()
        if not math.isfinite(value)
    ]
    parts = collections.defaultdict[str, dict[str, float]](dict)
    for name, value in figures.items():
        figure, of, tensor = name.partition(" of ")
        label, slash, figure = figure.rpartition("/")
        parts[label + slash][figure + of + tensor] = value
    for label, part in parts.items():
        for name, is_healthy, words, applies in RANGES:
            for figure, value in part.items():
                if figure.partition(" of ")[0] != name or not math.isfinite(value):
                    continue
                if applies(part) and not is_healthy(value, workers):
                    found.append(f"{label}{figure}={value:.4g}: {words}")
    return tuple(found)
