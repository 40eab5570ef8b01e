"""Finds which values of a program differ between workers, and refuses programs that would hang.

The check follows values from the inputs on. Sharded inputs and a worker's index vary over mesh
axes; results of ``psum`` and ``all_gather`` do not. A collective under a condition that holds on
some workers only never ends, and is refused.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Axes = frozenset[str]
Program = Jaxpr | ClosedJaxpr

# Their results are the same on all workers along their axes; results of other collectives are not.
_EQUALIZING = frozenset(
    {
        "psum",
        "psum_invariant",
        "unreduced_psum",
        "pmax",
        "pmin",
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
    }
)
_COLLECTIVES = _EQUALIZING | {
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "pbroadcast",
    "reduce_scatter",
    "unreduced_reduce_scatter",
}


def check_collectives(jaxpr: Jaxpr) -> list[Axes]:
    """Checks a program that maps over workers by ``jax.shard_map``.

    Args:
      jaxpr: the program around the map, such as that of a ``jax.stages.Traced``.

    Returns:
      The mesh axes that each of its results may vary over, axes of size 1 and those that it is
      split over excluded.

    Raises:
      ValueError: for a collective under a condition that may differ between workers.
    """
    return axes_of_results(jaxpr, [Axes()] * len(jaxpr.invars))


def leaves_with_axes(varies: Any) -> list[tuple[Any, Axes]]:
    """The paths of a tree's leaves, and the axes that each varies over."""
    return jax.tree_util.tree_leaves_with_path(varies, is_leaf=lambda x: isinstance(x, frozenset))


def axes_of_results(jaxpr: Program, given: Sequence[Axes]) -> list[Axes]:
    """The axes that a program's results may vary over, given those of its arguments."""
    varies: dict[Any, Axes] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: Any) -> Axes:
        return Axes() if isinstance(atom, Literal) else varies.get(atom, Axes())

    for eqn in jaxpr.eqns:
        results = _results(eqn, [of(x) for x in eqn.invars])
        varies.update(zip(eqn.outvars, results, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _results(eqn: Any, given: list[Axes]) -> list[Axes]:
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        specs = zip(given, params["in_specs"], strict=True)
        results = axes_of_results(params["jaxpr"], [x | _names(tuple(spec)) for x, spec in specs])
        alone = Axes(name for name, size in params["mesh"].shape.items() if size == 1)
        # A split array varies rightly: outside it is one array, as is what is computed of it.
        specs = zip(results, params["out_specs"], strict=True)
        return [x - alone - _names(tuple(spec)) for x, spec in specs]
    if name == "cond":
        _check_condition(given[0], *params["branches"])
        by_branch = [axes_of_results(branch, given[1:]) for branch in params["branches"]]
        return [given[0].union(*results) for results in zip(*by_branch, strict=True)]
    if name == "while":
        return _while(params, given)
    if name == "scan":
        constants, start, others = _of_scan(params, given)
        carried = _carried(params["jaxpr"], constants, start, others)
        return axes_of_results(params["jaxpr"], [*constants, *carried, *others])
    if name == "optimization_barrier":
        return given
    if params.get("name") == "equal_on_all_workers":
        return [Axes()] * len(given)
    if "axes_of_results" in params:  # an update that stands for those of all workers
        return list(params["axes_of_results"])
    everything = Axes().union(*given)
    if name == "axis_index":
        everything = _names(params["axis_name"])
    elif name in _EQUALIZING and params.get("axis_index_groups") is None:
        everything -= _axes(eqn)
    elif name in _COLLECTIVES:
        everything |= _axes(eqn)
    else:
        inner = [sub for value in params.values() for sub in programs_in(value)]
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            results = axes_of_results(inner[0], given)
            if len(results) == len(eqn.outvars):
                return results
    return [everything] * len(eqn.outvars)


def _of_scan(params: dict[str, Any], given: list[Axes]) -> list[list[Axes]]:
    """The inputs of a scan: constants, the carry, and the arrays that it scans over."""
    if "ft_in" in params:  # since JAX 0.12
        return [list(part) for part in params["ft_in"].update(given).unpack()]
    constants, end = params["num_consts"], params["num_consts"] + params["num_carry"]
    return [given[:constants], given[constants:end], given[end:]]


def _while(params: dict[str, Any], given: list[Axes]) -> list[Axes]:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    start = of_condition + of_body
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    carried = _carried(body, given[of_condition:start], given[start:], [])
    [predicate] = axes_of_results(condition, [*given[:of_condition], *carried])
    _check_condition(predicate, condition, body)
    # Results do not count as varying with the number of iterations: xla_workarounds.materialize
    # passes arrays through zero-iteration loops, and hides from XLA that they are such.
    return carried


def _carried(
    body: Program, constants: list[Axes], carried: list[Axes], others: list[Axes]
) -> list[Axes]:
    """The axes that a loop's carry varies over after any number of iterations."""
    while True:
        results = axes_of_results(body, [*constants, *carried, *others])
        after = [x | y for x, y in zip(carried, results, strict=False)]
        if after == carried:
            return carried
        carried = after


def _check_condition(predicate: Axes, *programs: Program) -> None:
    for eqn in collectives(programs):
        if shared := predicate & _axes(eqn):
            raise ValueError(
                f"the {eqn.primitive.name} over {sorted(_axes(eqn))} is called under a condition "
                f"that workers along {sorted(shared)} need not share, such as a condition on one "
                f"worker's gradients (optax.apply_if_finite around an optimizer that averages over "
                f"workers has one): they would wait for each other for ever. Base the condition on "
                f"values that are equal on all workers, for example by jax.lax.pmin of a flag; for "
                f"gradients that are not finite take onebit_jax.skip_nonfinite(tx, axis), which "
                f"train_step has built in."
            )


def equations(programs: Sequence[Program]) -> Iterator[Any]:
    """All equations of programs, those of programs within them included."""
    for program in programs:
        for eqn in program.eqns:
            yield eqn
            for value in eqn.params.values():
                yield from equations(programs_in(value))


def collectives(programs: Sequence[Program]) -> Iterator[Any]:
    """The equations that call a collective, wherever they are in programs."""
    return (eqn for eqn in equations(programs) if eqn.primitive.name in _COLLECTIVES)


def programs_in(value: Any) -> list[Program]:
    """The programs in a parameter of an equation."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in values if isinstance(x, Program)]


def _axes(eqn: Any) -> Axes:
    return _names(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])


def _names(entries: Any) -> Axes:
    """The names of axes in a partition spec or a parameter: strings, alone or in tuples."""
    if isinstance(entries, str):
        return Axes({entries})
    return Axes().union(*map(_names, entries)) if isinstance(entries, (tuple, list)) else Axes()
