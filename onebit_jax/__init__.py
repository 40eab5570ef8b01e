"""Optax optimizers that send one bit per parameter, and the collectives beneath them."""

from onebit_jax import plan
from onebit_jax.collectives.drive import Drive
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.collectives.largest_values import LargestValues
from onebit_jax.collectives.majority_vote import MajorityVote
from onebit_jax.markers import PerWorker
from onebit_jax.programs import wire
from onebit_jax.states.adam_conversion import from_adam, to_adam
from onebit_jax.states.on_mesh import on_mesh
from onebit_jax.states.placement import state_specs
from onebit_jax.states.resizing import resize
from onebit_jax.states.sharded_model import init
from onebit_jax.states.worker_step import worker_copies, worker_copy, worker_step
from onebit_jax.training.train_step import TrainStep, train_step
from onebit_jax.transforms import step_sets
from onebit_jax.transforms.birder import ScaleByBirderState, binsgdm, birder, scale_by_birder
from onebit_jax.transforms.cada import CadaState, cada
from onebit_jax.transforms.clip_by_common_norm import clip_by_common_norm
from onebit_jax.transforms.compressed_mean import (
    CompressedMeanState,
    DelayedMeanState,
    compressed_mean,
)
from onebit_jax.transforms.distributed_lion import (
    ScaleByDistributedLionState,
    distributed_lion,
    scale_by_distributed_lion,
)
from onebit_jax.transforms.ef_signsgd import EfSignsgdState, ef_signsgd
from onebit_jax.transforms.fetch_sgd import FetchSgdState, fetch_sgd
from onebit_jax.transforms.local_steps import local_steps
from onebit_jax.transforms.local_steps_state import LocalStepsState
from onebit_jax.transforms.mean_gradients import mean_gradients
from onebit_jax.transforms.nonfinite import NonFiniteError
from onebit_jax.transforms.onebit_adam import (
    ScaleByOnebitAdamState,
    onebit_adam,
    onebit_adam_published,
    scale_by_onebit_adam,
)
from onebit_jax.transforms.onebit_lamb import (
    ScaleByOnebitLambState,
    onebit_lamb,
    scale_by_onebit_lamb,
)
from onebit_jax.transforms.onebit_lamb_published import (
    ScaleByOnebitLambPublishedState,
    onebit_lamb_published,
    scale_by_onebit_lamb_published,
)
from onebit_jax.transforms.onebit_muon import onebit_muon
from onebit_jax.transforms.per_worker import per_worker
from onebit_jax.transforms.signum import signum
from onebit_jax.transforms.skip_nonfinite import SkipNonfiniteState, skip_nonfinite
from onebit_jax.transforms.step_sets import zero_one_adam_phase
from onebit_jax.transforms.warmup import VarianceStable, variance_stable
from onebit_jax.transforms.zero_one_adam import ZeroOneAdamState, zero_one_adam
from onebit_jax.watching.diagnosis import Diagnosis, diagnose
from onebit_jax.watching.replica_checksums import Divergence, ReplicaDivergenceError

__version__ = "0.2.0"

__all__ = [
    "CadaState",
    "CompressedMeanState",
    "DelayedMeanState",
    "Diagnosis",
    "Divergence",
    "Drive",
    "EfSignsgdState",
    "ExchangeOptions",
    "FetchSgdState",
    "LargestValues",
    "LocalStepsState",
    "MajorityVote",
    "NonFiniteError",
    "PerWorker",
    "ReplicaDivergenceError",
    "ScaleByBirderState",
    "ScaleByDistributedLionState",
    "ScaleByOnebitAdamState",
    "ScaleByOnebitLambPublishedState",
    "ScaleByOnebitLambState",
    "SkipNonfiniteState",
    "TrainStep",
    "VarianceStable",
    "ZeroOneAdamState",
    "binsgdm",
    "birder",
    "cada",
    "clip_by_common_norm",
    "compressed_mean",
    "diagnose",
    "distributed_lion",
    "ef_signsgd",
    "fetch_sgd",
    "from_adam",
    "init",
    "local_steps",
    "mean_gradients",
    "on_mesh",
    "onebit_adam",
    "onebit_adam_published",
    "onebit_lamb",
    "onebit_lamb_published",
    "onebit_muon",
    "per_worker",
    "plan",
    "resize",
    "scale_by_birder",
    "scale_by_distributed_lion",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "scale_by_onebit_lamb_published",
    "signum",
    "skip_nonfinite",
    "state_specs",
    "step_sets",
    "to_adam",
    "train_step",
    "variance_stable",
    "wire",
    "worker_copies",
    "worker_copy",
    "worker_step",
    "zero_one_adam",
    "zero_one_adam_phase",
]
