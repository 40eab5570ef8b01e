"""From predictions to advice: whether one bit pays, and below which bandwidth; as a table, too."""

import math
from typing import NamedTuple

from onebit_jax.plan.model import Prediction, Setting, check, covered, predict
from onebit_jax.plan.optimizers import BFLOAT16, FLOAT32, Optimizer, local_steps, rows, state_bytes
from onebit_jax.plan.quantities import format_rate, format_size, format_table, format_time
from onebit_jax.transforms.onebit_adam import WARMUP

# A gain below the first is within the model's error; below the second there is no gain.
_WORTHWHILE, _NONE = 1.1, 1.02
_LOSS = (
    "This compares time and bytes, not losses. The advice is about 1-bit Adam: other optimizers "
    "reach other losses, and local steps another one for each --every."
)


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
    1-bit Adam, hierarchical, is 2.5x as fast as dense bfloat16 here: use it.
    """
    check(setting)
    dense = tuple(predict(optimizer, setting) for optimizer in (FLOAT32, BFLOAT16))
    bits = dict.fromkeys((32, setting.local_bits))
    asked = (*rows(), *(local_steps(setting.every, each) for each in bits))
    timed = covered(asked, setting)
    left_out = tuple(optimizer for optimizer in asked if optimizer not in timed)
    onebit = tuple(predict(optimizer, setting) for optimizer in timed)
    thresholds = {
        x.name: (_threshold(x, FLOAT32, setting), _threshold(x, BFLOAT16, setting)) for x in timed
    }
    made = Plan(setting, dense, onebit, left_out, thresholds, advice="")
    return made._replace(advice=_advice(made))


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


def _advice(plan: Plan) -> str:
    setting, dense = plan.setting, plan.dense[1]
    best = min((p for p in plan.onebit if p.optimizer.advised), key=lambda p: p.run)
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
        below = plan.thresholds[name][1]
        if gain <= 1 and 0 < below < math.inf:
            sentences.append(f"It would be faster below {format_rate(below)}.")
    earliest, modelled = WARMUP.earliest_end(), setting.warmup * setting.steps
    if setting.steps <= earliest:
        sentences.append(
            f"onebit_adam's default warm-up does not end before update {earliest}, and "
            f"this run has {setting.steps}: give it warmup=N, a number of updates."
        )
    elif modelled < earliest:
        sentences.append(
            f"onebit_adam's default warm-up does not end before update {earliest}, but this counts "
            f"{modelled:.0f}: --warmup {earliest / setting.steps:.2g} counts all, or give it "
            f"warmup=N."
        )
    return " ".join(sentences).replace("%", " %")


def table(plan: Plan) -> str:
    """Plain text: the predictions, the bandwidths from which one bit pays, and the advice.

    With a calibration each row names the kind that its work was measured as, and a line below the
    table names the optimizers that the calibration lacks. Of a split model each row has also what a
    device sends through its node's card, and the state that it holds.
    """
    setting = plan.setting
    calibrated, split = setting.calibration is not None, setting.shards > 1
    header = ["", "exchange", "work", "a step", "warm-up step", "run", "a node sends", "in all"]
    rows = [header + split * ["a device", "its state"] + calibrated * ["work measured as"]]
    for p in (*plan.dense, *plan.onebit):
        seconds = (p.exchange, p.work, p.step, p.warmup_step, p.run)
        times = ["" if x is None else format_time(x) for x in seconds]
        sizes = [format_size(p.step_bytes), format_size(p.run_bytes)]
        of_device = _of_device(p, setting) if split else []
        measured = calibrated * [p.optimizer.benchmark]
        rows.append([p.optimizer.name, *times, *sizes, *of_device, *measured])
    lines = [
        f"{setting.parameters:,} parameters, {setting.workers} workers"
        f"{f' of {setting.shards} devices' if split else ''}, "
        f"{setting.per_node} {'devices ' if split else ''}per node, "
        f"{format_rate(setting.bandwidth)} per node, "
        f"{format_time(setting.step_time)} of compute per step",
        "",
        *format_table(rows),
    ]
    if plan.left_out:
        names = ", ".join(optimizer.name for optimizer in plan.left_out)
        lines += ["", f"Left out, since the calibration does not have them: {names}."]
    lines.append("")
    for name, (float32, bfloat16) in plan.thresholds.items():
        lines.append(
            f"{name}: faster than dense float32 {_below(float32)}, "
            f"than dense bfloat16 {_below(bfloat16)}."
        )
    lines += ["", _LOSS]
    return "\n".join([*lines, "", plan.advice])


def _of_device(prediction: Prediction, setting: Setting) -> list[str]:
    """What a device sends in a step, one way, and the bytes of its state."""
    each = state_bytes(prediction.optimizer, setting.workers, setting.workers_per_node)
    held = setting.parameters / setting.shards * each
    return [format_size(prediction.step_bytes / setting.per_node), format_size(held)]


def _below(bandwidth: float) -> str:
    if bandwidth == 0:
        return "below none"
    return "at any bandwidth" if math.isinf(bandwidth) else f"below {format_rate(bandwidth)}"
