"""An optimizer in loops of others: beside parameters that are split, and under ``jax.pmap``."""

from onebit_jax.sharding.check_step import check_step
from onebit_jax.sharding.on_mesh import on_mesh
from onebit_jax.sharding.worker_step import worker_copies, worker_copy, worker_step

__all__ = ["check_step", "on_mesh", "worker_copies", "worker_copy", "worker_step"]
