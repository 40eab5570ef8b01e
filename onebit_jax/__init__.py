"""Optax optimizers that send one bit per parameter, and the collectives beneath them."""

from onebit_jax import plan
from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.markers import PerWorker
from onebit_jax.programs import wire
from onebit_jax.states.adam_conversion import from_adam, to_adam
from onebit_jax.states.placement import init, state_specs
from onebit_jax.states.resizing import resize
from onebit_jax.training.gradients import WeightedLoss
from onebit_jax.training.train_step import train_step
from onebit_jax.transforms.before_an_exchange import clip_by_common_norm, per_worker
from onebit_jax.transforms.birder import binsgdm, birder, scale_by_birder
from onebit_jax.transforms.compressed_mean import compressed_mean, mean_gradients
from onebit_jax.transforms.distributed_lion import (
    distributed_lion,
    scale_by_distributed_lion,
    signum,
)
from onebit_jax.transforms.ef_signsgd import ef_signsgd
from onebit_jax.transforms.local_steps import local_steps
from onebit_jax.transforms.onebit_adam import onebit_adam, scale_by_onebit_adam
from onebit_jax.transforms.onebit_adam_published import onebit_adam_published
from onebit_jax.transforms.onebit_lamb import onebit_lamb, scale_by_onebit_lamb
from onebit_jax.transforms.onebit_muon import onebit_muon
from onebit_jax.transforms.schedules import variance_stable
from onebit_jax.transforms.skip_nonfinite import NonFiniteError, skip_nonfinite
from onebit_jax.transforms.zero_one_adam import zero_one_adam
from onebit_jax.watching.diagnosis import diagnose
from onebit_jax.watching.replica_checksums import ReplicaDivergenceError

__version__ = "0.2.0"

__all__ = [
    "ExchangeOptions",
    "NonFiniteError",
    "PerWorker",
    "ReplicaDivergenceError",
    "WeightedLoss",
    "binsgdm",
    "birder",
    "clip_by_common_norm",
    "compressed_mean",
    "diagnose",
    "distributed_lion",
    "ef_signsgd",
    "from_adam",
    "init",
    "local_steps",
    "mean_gradients",
    "onebit_adam",
    "onebit_adam_published",
    "onebit_lamb",
    "onebit_muon",
    "per_worker",
    "plan",
    "resize",
    "scale_by_birder",
    "scale_by_distributed_lion",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "signum",
    "skip_nonfinite",
    "state_specs",
    "to_adam",
    "train_step",
    "variance_stable",
    "wire",
    "zero_one_adam",
]
