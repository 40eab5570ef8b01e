"""From predictions to advice: whether one bit pays, and below which bandwidth."""

import math
from typing import NamedTuple

from onebit_jax.plan.calibration import covers
from onebit_jax.plan.model import Prediction, Setting, check, predict
from onebit_jax.plan.optimizers import BFLOAT16, FLOAT32, Optimizer, local_steps, rows
from onebit_jax.plan.quantities import format_rate
from onebit_jax.transforms.onebit_adam import WARMUP

# A gain below the first is within the model's error; below the second there is no gain.
_WORTHWHILE, _NONE = 1.1, 1.02


class Plan(NamedTuple):
    """A table of predictions, and the advice that follows from it.

    Attributes:
      setting: the run and the machines.
      dense: predictions for float32 and bfloat16, in this order.
      onebit: predictions for each of :func:`rows` and for local steps, except ``left_out``.
      left_out: the optimizers whose kinds the setting's calibration lacks.
      thresholds: for each name in ``onebit``, the bandwidths in bit/s below which a run is faster
        than with dense float32 and bfloat16; ``inf`` if it always is, 0 if it never is.
      advice: one or more sentences.
    """

    setting: Setting
    dense: tuple[Prediction, ...]
    onebit: tuple[Prediction, ...]
    left_out: tuple[Optimizer, ...]
    thresholds: dict[str, tuple[float, float]]
    advice: str


def plan(setting: Setting) -> Plan:
    """Predicts a run with each optimizer.

    Args:
      setting: the run and the machines.

    Raises:
      ValueError: for a field outside its range, or a calibration that lacks dense Adam or 1-bit
        Adam, which the advice compares.

    >>> setting = Setting(
    ...     parameters=340_000_000,
    ...     workers=64,
    ...     per_node=4,
    ...     bandwidth=10e9,
    ...     step_time=0.45,
    ...     steps=150_000,
    ... )
    >>> print(plan(setting).advice)
    1-bit Adam, hierarchical, is 2.3x as fast as dense bfloat16 here: use it.
    """
    check(setting)
    dense = tuple(predict(optimizer, setting) for optimizer in (FLOAT32, BFLOAT16))
    bits = dict.fromkeys((32, setting.local_bits))
    asked = (*rows(), *(local_steps(setting.every, each) for each in bits))
    covered = [row for row in asked if covers(setting.calibration, row, setting.warmup_bits)]
    left_out = tuple(row for row in asked if row not in covered)
    onebit = tuple(predict(optimizer, setting) for optimizer in covered)
    thresholds = {
        optimizer.name: (
            _threshold(optimizer, FLOAT32, setting),
            _threshold(optimizer, BFLOAT16, setting),
        )
        for optimizer in covered
    }
    advice = _advice(setting, dense[1], onebit, thresholds)
    return Plan(setting, dense, onebit, left_out, thresholds, advice)


def _threshold(optimizer: Optimizer, dense: Optimizer, setting: Setting) -> float:
    """The bandwidth below which a run is faster; ``inf`` if at any, 0 if below none."""

    def faster(exponent: float) -> bool:
        at = setting._replace(bandwidth=10**exponent)
        return predict(optimizer, at).run < predict(dense, at).run

    # A scan from 1 bit/s to 1 Ebit/s, then a bisection: if the local links limit the dense exchange
    # first, one bit may lose at some bandwidths and win again above them.
    steps_a_decade = 20
    exponents = (i / steps_a_decade for i in range(18 * steps_a_decade + 1))
    high = next((exponent for exponent in exponents if not faster(exponent)), math.inf)
    if high in (0, math.inf):
        return high
    low = high - 1 / steps_a_decade
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return 10**low


def _advice(
    setting: Setting,
    dense: Prediction,
    onebit: tuple[Prediction, ...],
    thresholds: dict[str, tuple[float, float]],
) -> str:
    best = min((p for p in onebit if p.optimizer.advised), key=lambda p: p.run)
    name, gain = best.optimizer.name, dense.run / best.run
    against = dense.optimizer.name
    if gain >= _WORTHWHILE:
        sentences = [f"{name}, is {gain:.1f}x as fast as {against} here: use it."]
    else:
        verdict = "Hardly worth it" if gain > _NONE else "Do not use it"
        change = f"{abs(1 - 1 / gain):.1%} {'less' if gain > 1 else 'more'} time"
        # Noise in a calibration can make the work of an exchange negative.
        most = max(1.0, dense.step / setting.step_time)
        sentences = [
            f"{verdict}: {name}, would take {change} than {against}.",
            f"The exchange is {1 - 1 / most:.0%} of a {against} step: no compression could be "
            f"more than {most:.2f}x as fast.",
        ]
        below = thresholds[name][1]
        if gain <= 1 and 0 < below < math.inf:
            sentences.append(f"It would be faster below {format_rate(below)}.")
    if setting.steps <= WARMUP.min_steps:
        sentences.append(
            f"onebit_adam's default warm-up does not end before update {WARMUP.min_steps}, and "
            f"this run has {setting.steps}: give it warmup=N, a number of updates."
        )
    return " ".join(sentences).replace("%", " %")
