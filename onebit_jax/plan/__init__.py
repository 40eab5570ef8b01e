"""Predicts whether one bit pays: a run's time and volume, before any code is changed.

    print(table(plan(Setting(...))))

is what ``python -m onebit_jax plan`` prints; :mod:`onebit_jax.plan.model` says what is predicted.
"""

from onebit_jax.plan.advice import Plan, plan
from onebit_jax.plan.calibration import CALIBRATED_KINDS, read_calibration
from onebit_jax.plan.model import Prediction, Setting, predict
from onebit_jax.plan.optimizers import (
    BFLOAT16,
    BIRDER,
    COMPRESSED_MEAN_4,
    COMPRESSED_MEAN_8,
    DISTRIBUTED_LION,
    EF_SIGNSGD,
    FLOAT32,
    ONEBIT,
    ONEBIT_ADAM,
    ONEBIT_ADAM_HIERARCHICAL,
    ONEBIT_LAMB,
    ONEBIT_MUON,
    SIGNUM,
    ZERO_ONE_ADAM,
    Optimizer,
    local_steps,
)
from onebit_jax.plan.quantities import parse_rate, parse_seconds
from onebit_jax.plan.report import table

__all__ = [
    "BFLOAT16",
    "BIRDER",
    "CALIBRATED_KINDS",
    "COMPRESSED_MEAN_4",
    "COMPRESSED_MEAN_8",
    "DISTRIBUTED_LION",
    "EF_SIGNSGD",
    "FLOAT32",
    "ONEBIT",
    "ONEBIT_ADAM",
    "ONEBIT_ADAM_HIERARCHICAL",
    "ONEBIT_LAMB",
    "ONEBIT_MUON",
    "SIGNUM",
    "ZERO_ONE_ADAM",
    "Optimizer",
    "Plan",
    "Prediction",
    "Setting",
    "local_steps",
    "parse_rate",
    "parse_seconds",
    "plan",
    "predict",
    "read_calibration",
    "table",
]
