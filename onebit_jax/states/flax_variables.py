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
    if not any(map(_is_variable, jax.tree.leaves(params, is_leaf=_is_variable))):
        return state
    nnx: Any = sys.modules["flax.nnx"]

    def variable(x: Any, spec: Any) -> Any:
        if _is_variable(x) or not (isinstance(spec, P) and names_of(spec)):
            return x
        return nnx.Variable(x, out_sharding=spec, eager_sharding=False)

    return jax.tree.map(variable, state, specs, is_leaf=_is_variable)


def without_shardings(state: Any, params: Any) -> Any:
    """Takes the leaves out of the Variables that :func:`with_shardings` put them into.

    ``nnx.Optimizer`` does so before it calls ``update``, a step of one's own does not. Variables of
    parameters, at paths that end in a parameter's, stay.
    """
    variables = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    paths = {path for path, _ in variables}

    def inner(path: Any, x: Any) -> Any:
        of_parameter = any(path[i:] in paths for i in range(len(path)))
        if not _is_variable(x) or of_parameter or not jax.tree.leaves(x):
            return x
        return _value(x)

    return jax.tree_util.tree_map_with_path(inner, state, is_leaf=_is_variable)


def without_variables(tree: Any) -> Any:
    """Takes all values out of Flax NNX's Variables; other nodes stay."""
    return jax.tree.map(lambda x: _value(x) if _is_variable(x) else x, tree, is_leaf=_is_variable)


def _value(variable: Any) -> Any:
    return next(iter(jax.tree.leaves(variable, is_leaf=lambda x: x is not variable)), None)


def _is_variable(node: Any) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)
