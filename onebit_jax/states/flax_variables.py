"""Tells Flax NNX how those leaves of a state are split that are not like parameters."""

import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from onebit_jax.states.specs import names_of


def with_shardings(params: Any, state: Any, specs: Any) -> Any:
    """Puts leaves into ``nnx.Variable`` of a known sharding, where parameters are such.

    ``nnx.Optimizer``, and MaxText on it, keep the sharding that a Variable states, and replicate an
    array that comes without one: every step would gather it.

    Args:
      params: the parameters; where they are no Variables the state stays as it is.
      state: the optimizer's state. In trees like the parameters its leaves are Variables already.
      specs: the partition specs of its leaves.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return state

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    if not any(map(is_variable, jax.tree.leaves(params, is_leaf=is_variable))):
        return state

    def variable(x: Any, spec: Any) -> Any:
        if is_variable(x) or not (isinstance(spec, P) and names_of(spec)):
            return x
        return nnx.Variable(x, out_sharding=spec, eager_sharding=False)

    return jax.tree.map(variable, state, specs, is_leaf=is_variable)
