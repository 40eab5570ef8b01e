"""What stands in a program for an update of workers that no ``jax.vmap`` maps over."""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

_NO_VMAP = (
    "onebit_jax.on_mesh: update was called without jax.vmap over the workers, so that all of them "
    "would have one gradient, and nothing says whose. Run the whole training step by "
    "onebit_jax.worker_step(step, mesh, axis_name=...), or under jax.vmap with "
    "spmd_axis_name=axis_name (on Explicit meshes without)."
)


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError(_NO_VMAP)


# Stands in a program for the update outside of vmap, which is traced even where vmap comes later:
# only a program that is to be compiled or run with it is wrong.
missing_vmap = Primitive("missing_vmap_over_workers")
missing_vmap.multiple_results = True
missing_vmap.def_impl(_refuse)
missing_vmap.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(missing_vmap, _refuse)
