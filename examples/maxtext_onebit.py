"""MaxText's own pre-training, its optimizer one of onebit_jax between DiLoCo replicas.

    python examples/maxtext_onebit.py BASE_YML optimizer=onebit_muon scan_layers=false \
        enable_diloco=true ici_diloco_parallelism=2 ici_fsdp_parallelism=2 \
        diloco_sync_period=1000000 ...

`optimizer` is `onebit_adam`, `onebit_muon` or `local_steps`. Replicas exchange inside of it, and
DiLoCo's own synchronization never comes. Since MaxText would clip each replica alone, the optimizer
clips all of them by one norm, at MaxText's `gradient_clipping_threshold`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax
from absl import app
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.optimizers import optimizers  # pyright: ignore[reportMissingImports]
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]
from maxtext.utils import sharding  # pyright: ignore[reportMissingImports]

import onebit_jax
from onebit_jax.sharding import on_mesh

AXIS = "diloco"


def onebit_adam(config: Any, schedule: Any) -> Any:
    """1-bit Adam, the first fifth of its steps dense."""
    decays = config.adam_b1, config.adam_b2, config.adam_eps
    warmup = max(1, config.steps // 5)
    decay = config.adam_weight_decay
    return onebit_jax.onebit_adam(
        schedule, *decays, weight_decay=decay, warmup=warmup, axis_name=AXIS
    )


def onebit_muon(config: Any, schedule: Any) -> Any:
    """1-bit Muon of the kernels with two axes; Adam has those of attention, which have three."""
    if config.scan_layers:
        raise ValueError("Set scan_layers=false: kernels of all layers in one array have 3 axes.")

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: p.ndim == 2 and "kernel" in jax.tree_util.keystr(path), params
        )

    decay = config.adam_weight_decay
    return onebit_jax.onebit_muon(
        schedule, weight_decay=decay, consistent_rms=0.2, matrices=matrices, axis_name=AXIS
    )


def local_steps(config: Any, schedule: Any) -> Any:
    """AdamW on each replica, and every ten steps 4 bits of how far it came."""
    inner = optax.adamw(schedule, config.adam_b1, config.adam_b2, config.adam_eps)
    rate, momentum = config.diloco_outer_lr, config.diloco_outer_momentum
    outer = optax.sgd(rate, momentum=momentum, nesterov=True)
    return onebit_jax.local_steps(inner, outer, every=10, bits=4, axis_name=AXIS)


OPTIMIZERS = {f.__name__: f for f in (onebit_adam, onebit_muon, local_steps)}


def get_optimizer(
    name: str, max_norm: float, config: Any, schedule: Any, model: Any = None, mesh: Any = None
) -> Any:
    """What MaxText asks for its optimizer; `model` and `mesh` are always given in pre-training."""
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        specs = jax.tree.map(
            lambda v: sharding.get_nnx_var_named_sharding_with_scan_axis(v, mesh).get_value(),
            nnx.state(model, nnx.Param),
            is_leaf=lambda v: isinstance(v, nnx.Variable),
        )
    tx = OPTIMIZERS[name](config, schedule)
    if max_norm:
        tx = optax.chain(onebit_jax.clip_by_common_norm(max_norm, AXIS), tx)
    return on_mesh(tx, mesh, axis_name=AXIS, specs=specs)


def main(argv: Sequence[str]) -> None:
    """Runs MaxText, but takes the optimizer and the clipping from it."""
    given = {"optimizer": "onebit_adam", "gradient_clipping_threshold": "1.0"}
    given |= dict(x.split("=", 1) for x in argv if x.partition("=")[0] in given)
    name, max_norm = given["optimizer"], float(given["gradient_clipping_threshold"])
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name} must be one of {', '.join(OPTIMIZERS)}.")
    if max_norm and name == "local_steps":
        raise ValueError(
            "Set gradient_clipping_threshold=0 for local_steps: to share a norm, replicas would "
            "wait for each other in every step."
        )
    optimizers.get_optimizer = functools.partial(get_optimizer, name, max_norm)
    others = [x for x in argv if x.partition("=")[0] not in given]
    train.main([*others, "gradient_clipping_threshold=0"])


if __name__ == "__main__":
    app.run(main)
