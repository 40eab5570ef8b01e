"""Predicts whether one bit pays: a run's time and volume, before any code is changed.

    print(table(plan(Setting(...))))

is what ``python -m onebit_jax plan`` prints; :mod:`onebit_jax.plan.model` says what is predicted.
"""

from onebit_jax.plan.advice import Plan, plan, table
from onebit_jax.plan.calibration import calibrated_kinds, read_calibration
from onebit_jax.plan.model import Prediction, Setting, predict
from onebit_jax.plan.optimizers import (
    BFLOAT16,
    COMPRESSED_MEAN_4,
    COMPRESSED_MEAN_8,
    FLOAT32,
    MUON_ONE_STEP_LATE,
    Optimizer,
    local_steps,
    row,
    rows,
    state_bytes,
)
from onebit_jax.plan.quantities import parse_rate, parse_seconds
from onebit_jax.plan.utilization import Utilization, utilization, utilization_table

__all__ = [
    "BFLOAT16",
    "COMPRESSED_MEAN_4",
    "COMPRESSED_MEAN_8",
    "FLOAT32",
    "MUON_ONE_STEP_LATE",
    "Optimizer",
    "Plan",
    "Prediction",
    "Setting",
    "Utilization",
    "calibrated_kinds",
    "local_steps",
    "parse_rate",
    "parse_seconds",
    "plan",
    "predict",
    "read_calibration",
    "row",
    "rows",
    "state_bytes",
    "table",
    "utilization",
    "utilization_table",
]
