"""A step of training any model in PyTorch, with AdamW as `train` has it.

PyTorch need not be installed: only `python -m benchmarks.torch_step` imports this, if it is.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")

# Flax's names of a layer's parameters, where PyTorch has others.
_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
# Axes of PyTorch's matrices and of its convolutions, by those of Flax.
_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}


def load(model: Any, params: Any) -> None:
    """Gives a model the parameters of one of `train`'s, whose layers have the same names.

    Raises:
      RuntimeError: a parameter is missing, or is one too many, or has another shape.
    """
    tensors = dict(model.named_buffers())
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        *layers, name = (str(part.key) for part in path)
        axes = _AXES[array.ndim] if name == "kernel" else range(array.ndim)
        # A copy: PyTorch trains in place, and may not write what JAX owns.
        tensor = torch.from_numpy(np.array(array).transpose(axes).copy())
        tensors[".".join([*layers, _NAMES.get(name, name)])] = tensor
    model.load_state_dict(tensors)


class Training:
    """AdamW as `train` has it: clipping, decay of matrices alone, a learning rate for each step.

    Args:
      model: gives the loss of a batch, whose arrays are its arguments by name.
      params: to begin with.
      learning_rates: of the steps.
      weight_decay: of matrices.
      max_grad_norm: gradients are clipped to; None: they are not.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        learning_rates: Sequence[float],
        weight_decay: float,
        max_grad_norm: float | None,
    ):
        load(model, params)
        self._model = model
        self._parameters = list(model.parameters())
        groups = [
            {"params": [x for x in self._parameters if x.ndim > 1], "weight_decay": weight_decay},
            {"params": [x for x in self._parameters if x.ndim == 1], "weight_decay": 0.0},
        ]
        # In one pass over each tensor, the fastest that PyTorch has.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, fused=True)
        self._learning_rates = iter(learning_rates)
        self._max_grad_norm = max_grad_norm

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        """Trains on a batch; its loss before."""
        learning_rate = next(self._learning_rates)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.zero_grad()
        loss = self._model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        loss.backward()
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._adamw.step()
        return loss.item()
