"""MaxText's own pre-training, its optimizer 1-bit Adam between DiLoCo replicas.

    python examples/maxtext_onebit.py BASE_YML enable_diloco=true ici_diloco_parallelism=2 \
        ici_fsdp_parallelism=2 diloco_sync_period=1000000 gradient_clipping_threshold=0 ...

Replicas then differ in nothing: each step exchanges momenta, and DiLoCo's own synchronization never
comes. Clipping must be off, since MaxText would clip each replica alone.
"""

from typing import Any

import jax
from absl import app
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.optimizers import optimizers  # pyright: ignore[reportMissingImports]
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
from maxtext.utils import sharding  # pyright: ignore[reportMissingImports]

import onebit_jax


def get_optimizer(config: Any, schedule: Any, model: Any = None, mesh: Any = None) -> Any:
    """What MaxText asks for its optimizer; `model` and `mesh` are always given in pre-training."""
    if config.gradient_clipping_threshold > 0:
        raise ValueError(
            "Set gradient_clipping_threshold=0: MaxText would clip each replica alone."
        )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        specs = jax.tree.map(
            lambda v: sharding.get_nnx_var_named_sharding_with_scan_axis(v, mesh).get_value(),
            nnx.state(model, nnx.Param),
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    tx = onebit_jax.onebit_adam(
        schedule,
        config.adam_b1,
        config.adam_b2,
        config.adam_eps,
        weight_decay=config.adam_weight_decay,
        warmup=max(1, config.steps // 5),
        axis_name="diloco",
    )
    return onebit_jax.on_mesh(tx, mesh, axis_name="diloco", specs=specs)


if __name__ == "__main__":
    optimizers.get_optimizer = get_optimizer
    app.run(train.main)
