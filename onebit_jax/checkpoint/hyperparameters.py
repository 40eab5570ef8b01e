"""The hyperparameters that a checkpoint was made with, beside those of the run that restores it."""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import optax

from onebit_jax.programs.over_workers import abstract_mesh
from onebit_jax.states import simulated_workers as simulated


def of(tx: optax.GradientTransformation, params: Any, mesh: Any) -> list[dict[str, str]]:
    """The hyperparameters of each algorithm of this library in an optimizer, as text by name.

    Functions and hyperparameters that are injected are left out: they have no value to compare.

    Args:
      tx: the optimizer.
      params: the parameters.
      mesh: the axes that its workers run along; None where the state does not show them.
    """
    if mesh is None:
        return []
    shapes = jax.eval_shape(lambda x: x, params)
    workers = simulated.Workers(abstract_mesh(mesh))
    noted = simulated.algorithms(tx, shapes, workers)
    return [dict(_values("", x.algorithm)) for x in noted]


def _values(prefix: str, node: Any) -> Any:
    for field in dataclasses.fields(node):
        value, name = getattr(node, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _values(f"{name}.", value)
        elif isinstance(value, (bool, int, float, str, np.generic, type(None))):
            yield name, repr(value)


def warn_of_others(saved: Any, now: list[dict[str, str]], where: str) -> None:
    """Warns of hyperparameters that are not those of the checkpoint.

    Args:
      saved: the checkpoint's; None where it has none.
      now: those of the run.
      where: the checkpoint, for the message.
    """
    if not isinstance(saved, list) or len(saved) != len(now):
        return
    differing = [
        f"{name} was {before[name]} and is {here[name]}"
        for before, here in zip(saved, now, strict=True)
        if isinstance(before, dict)
        for name in sorted(before.keys() & here.keys())
        if before[name] != here[name]
    ]
    if differing:
        warnings.warn(
            f"{where} was saved with other hyperparameters: {', '.join(differing)}. The run goes "
            f"on with those of tx",
            stacklevel=3,
        )
