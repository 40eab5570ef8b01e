"""Optax optimizers that send one bit a parameter, and the collectives beneath them."""

from onebit_jax import plan, wire
from onebit_jax.per_worker import PerWorker
from onebit_jax.training import TrainStep, init, state_specs, train_step
from onebit_jax.transforms.mean_gradients import mean_gradients
from onebit_jax.transforms.onebit_adam import (
    ScaleByOnebitAdamState,
    onebit_adam,
    scale_by_onebit_adam,
)
from onebit_jax.transforms.onebit_lamb import (
    ScaleByOnebitLambState,
    onebit_lamb,
    scale_by_onebit_lamb,
)
from onebit_jax.transforms.warmup import VarianceStable, variance_stable

__all__ = [
    "PerWorker",
    "ScaleByOnebitAdamState",
    "ScaleByOnebitLambState",
    "TrainStep",
    "VarianceStable",
    "init",
    "mean_gradients",
    "onebit_adam",
    "onebit_lamb",
    "plan",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "state_specs",
    "train_step",
    "variance_stable",
    "wire",
]
