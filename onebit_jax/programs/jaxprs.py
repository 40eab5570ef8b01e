"""A walk through a program that tells which of its values differ between workers.

Along each mesh axis a value either is the same on all workers or may vary. Collectives such as
``psum`` make values the same; arguments that are split over an axis, and a worker's own index,
vary; everything else varies if something that it is computed from does.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# One class since JAX 0.11, in whose types ClosedJaxpr is missing.
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]

from onebit_jax.collectives.axes import equal_p, own_p

Axes = frozenset[str]
Program = Jaxpr | ClosedJaxpr

# Their results are the same on all workers along their axes; results of other collectives are not.
_SUMS = frozenset(("psum", "psum_invariant", "unreduced_psum", "pmax", "pmin"))
_EQUALIZING = _SUMS | {"all_gather", "all_gather_invariant", "all_gather_reduced"}
_PERMUTING = frozenset(("all_to_all", "ragged_all_to_all", "ppermute", "pbroadcast"))
_COLLECTIVES = _EQUALIZING | _PERMUTING | {"reduce_scatter", "unreduced_reduce_scatter"}


def axes_of_results(program: Program, given: Sequence[Axes] | None = None) -> list[Axes]:
    """The axes that a program's results may vary over, given those of its arguments.

    Raises:
      ValueError: for a collective under a condition that workers need not share, which would hang,
        and for gradients that were averaged before an optimizer is given them.
    """
    given = [Axes()] * len(program.invars) if given is None else given
    varies: dict[Any, Axes] = dict(zip(program.invars, given, strict=True))

    def of(atom: Any) -> Axes:
        return Axes() if isinstance(atom, Literal) else varies.get(atom, Axes())

    for eqn in program.eqns:
        results = _results(eqn, [of(x) for x in eqn.invars])
        varies.update(zip(eqn.outvars, results, strict=True))
    return [of(x) for x in program.outvars]


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
    if eqn.primitive is equal_p:
        return [Axes()]
    if eqn.primitive is own_p:
        if not any(params["node"] in x for x in given):
            raise ValueError(
                f"the gradients that an optimizer is given are the same on all workers along "
                f"{params['node']!r}: they were averaged before, at full precision. Leave their "
                f"jax.lax.pmean or psum out, and axis_name of Flax's DynamicScale."
            )
        return given
    if "axes_of_results" in params:  # an update that stands for those of all workers
        return list(params["axes_of_results"])
    everything = Axes().union(*given)
    if name == "axis_index":
        everything = _names(params["axis_name"])
    elif name in _EQUALIZING and params.get("axis_index_groups") is None:
        everything -= axes_of(eqn)
    elif name in _COLLECTIVES:
        everything |= axes_of(eqn)
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
    return [x | predicate for x in carried]


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


def refuse_differing(named: Iterable[tuple[str, Axes]], mend: str) -> None:
    """Raises ``ValueError`` for the first value that varies over axes, though workers share it.

    Args:
      named: names of values, and the axes that they vary over.
      mend: how to mend it, for the message.
    """
    for name, over in named:
        if over:
            raise ValueError(
                f"{name} would differ between workers along {sorted(over)}, and replicas would "
                f"silently diverge. {mend}"
            )


def _check_condition(predicate: Axes, *programs: Program) -> None:
    for eqn in (eqn for program in programs for eqn in collectives(program)):
        if shared := predicate & axes_of(eqn):
            raise ValueError(
                f"the {eqn.primitive.name} over {sorted(axes_of(eqn))} is called under a condition "
                f"that workers along {sorted(shared)} need not share: they would wait for ever. "
                f"Take jax.lax.pmin of the flag; to skip gradients, onebit_jax.skip_nonfinite."
            )


def equations(program: Program) -> Iterator[Any]:
    """All equations of a program, those of programs within it included."""
    for eqn in program.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in programs_in(value):
                yield from equations(inner)


def collectives(program: Program) -> Iterator[Any]:
    """The equations that call a collective, wherever they are in a program."""
    return (eqn for eqn in equations(program) if eqn.primitive.name in _COLLECTIVES)


def programs_in(value: Any) -> list[Program]:
    """The programs in a parameter of an equation."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in values if isinstance(x, Program)]


def axes_of(eqn: Any) -> Axes:
    """The axes of a collective."""
    return _names(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])


def _names(entries: Any) -> Axes:
    """The names of axes in a partition spec or a parameter: strings, alone or in tuples."""
    if isinstance(entries, str):
        return Axes({entries})
    return Axes().union(*map(_names, entries)) if isinstance(entries, (tuple, list)) else Axes()
