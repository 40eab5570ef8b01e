"""An optimizer beside parameters that are split over the fast axes of a mesh."""

from onebit_jax.sharding.on_mesh import on_mesh
from onebit_jax.sharding.worker_step import worker_copies, worker_copy, worker_step

__all__ = ["on_mesh", "worker_copies", "worker_copy", "worker_step"]
