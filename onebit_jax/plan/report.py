"""A plan as a table of plain text."""

import math

from onebit_jax.plan.advice import Plan
from onebit_jax.plan.model import Prediction, Setting
from onebit_jax.plan.optimizers import state_bytes
from onebit_jax.plan.quantities import format_rate, format_size, format_table, format_time

_LOSS = (
    "This compares time and bytes, not losses. The advice is about 1-bit Adam: other optimizers "
    "reach other losses, and local steps another one for each --every."
)


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
