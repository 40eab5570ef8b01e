"""A plan as a table of plain text."""

import math

from onebit_jax.plan.advice import Plan
from onebit_jax.plan.quantities import format_rate, format_size, format_time


def table(plan: Plan) -> str:
    """Plain text: the predictions, the bandwidths from which one bit pays, and the advice."""
    setting = plan.setting
    header = ["", "exchange", "work", "a step", "warm-up step", "run", "a node sends", "in all"]
    rows = [header]
    for p in (*plan.dense, *plan.onebit):
        seconds = (p.exchange, p.work, p.step, p.warmup_step, p.run)
        times = ["" if x is None else format_time(x) for x in seconds]
        rows.append([p.optimizer.name, *times, format_size(p.step_bytes), format_size(p.run_bytes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{setting.parameters:,} parameters, {setting.workers} workers, {setting.per_node} a node, "
        f"{format_rate(setting.bandwidth)} a node, {format_time(setting.step_time)} of compute a "
        f"step",
        "",
        *(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ),
    ]
    lines.append("")
    for name, (float32, bfloat16) in plan.thresholds.items():
        lines.append(
            f"{name}, ends sooner than dense float32 {_below(float32)}, "
            f"than dense bfloat16 {_below(bfloat16)}."
        )
    return "\n".join([*lines, "", plan.advice])


def _below(bandwidth: float) -> str:
    if bandwidth == 0:
        return "below none"
    return "at any bandwidth" if math.isinf(bandwidth) else f"below {format_rate(bandwidth)}"
