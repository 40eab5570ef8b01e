"""How the language model is split over the fast axes of a mesh: FSDP and tensor parallelism.

Over "tensor" lie the heads, the feed-forward layer's width and the vocabulary, so that a block
needs a sum over this axis after attention and one after the feed-forward layer (Shoeybi et al.,
"Megatron-LM", arXiv:1909.08053). Over "fsdp" lies the other side of every matrix, which is gathered
where it is used, and a worker's share of the batch (Rajbhandari et al., "ZeRO", stage 3,
arXiv:1910.02054). Scales of norms are whole on all devices.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

FSDP, TENSOR = FAST_AXES = ("fsdp", "tensor")

_BY_COLUMNS = ("query", "key", "value", "gate", "expand")


def param_specs(axes: Collection[str], params: Any) -> Any:
    """The partition specs of the model's parameters.

    Args:
        axes: those of the fast axes that the mesh has.
        params: from `train.lm.model.init_params`, or their shapes.

    >>> kernel = jax.ShapeDtypeStruct((128, 448), "float32")
    >>> params = {"gate": {"kernel": kernel}, "norm": {"scale": kernel}}
    >>> param_specs(["fsdp", "tensor"], params)
    {'gate': {'kernel': P('fsdp', 'tensor')}, 'norm': {'scale': P()}}
    """
    fsdp, tensor = (name if name in axes else None for name in FAST_AXES)

    def spec(path: Any, _: Any) -> P:
        *_, layer, kind = (entry.key for entry in path)
        if kind == "scale":
            return P()
        return P(fsdp, tensor) if layer in _BY_COLUMNS else P(tensor, fsdp)

    return jax.tree_util.tree_map_with_path(spec, params)


def gathered(
    loss_fn: Callable[[Any, Any], Any], axes: Collection[str]
) -> Callable[[Any, Any], Any]:
    """The same loss, which uses every matrix whole over "fsdp".

    Left to itself the compiler splits activations instead, and moves them at every product.

    Args:
        loss_fn: of parameters and a batch; called where the mesh is set.
        axes: those of the fast axes that the mesh has.
    """
    others = [name for name in axes if name != FSDP]

    def of_whole(params: Any, batch: Any) -> Any:
        specs = param_specs(others, params)
        return loss_fn(jax.tree.map(jax.lax.with_sharding_constraint, params, specs), batch)

    return of_whole
