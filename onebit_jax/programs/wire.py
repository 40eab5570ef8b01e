"""What one step sends: the collectives of a program, read from its text.

    lowered = step.lower(params, opt_state, batch, phase="compression")
    print(wire.table(wire.collectives(lowered.compile(), mesh)))

A lowered program says what was asked for, a compiled program what is done. Only the second is what
travels: XLA may widen a dtype (a bfloat16 `psum` travels as float32 on CPU, a uint8 one as uint32
on TPU), merge several collectives into one, or add some to an automatically partitioned program.

Not read: `send` and `recv` (host callbacks, and permutations that a compiler took apart).
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from onebit_jax.programs import hlo

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

_ONCE_OR_NEVER = "once or never"


class Collective(NamedTuple):
    """One collective of a step; where it merges arrays of several dtypes, one for each dtype.

    Attributes:
        op: HLO's name for it: "all-reduce", "all-gather", "all-to-all", "reduce-scatter",
            "collective-permute" or "collective-broadcast".
        dtype: HLO's name for what travels: "u8", "f32", "bf16", ...
        operand_bytes: size of one worker's operand, for one execution.
        group_size: the number of workers that take part in it together.
        axis: the mesh axis they lie along, several joined by ","; "?" if no mesh was given or no
            set of its axes makes these groups.
        where: "" if every step executes it once, else the path to it, such as "loop 1" or
            "conditional 1 branch 0 / loop 2". In a `lax.cond`, branch 0 is the false one. A loop of
            at most one iteration, in which this library writes in place, is "once or never".
        executions: how often a step executes it (inside a branch or such a loop: if it is taken);
            None inside a loop whose trip count the program does not state.
        bytes_sent: what a worker sends in a step, all executions together; if their number is not
            known, what it sends in one.
    """

    op: str
    dtype: str
    operand_bytes: int
    group_size: int
    axis: str
    where: str
    executions: int | None
    bytes_sent: int


def collectives(
    program: jax.stages.Lowered | jax.stages.Compiled | str, mesh: Mesh | None = None
) -> list[Collective]:
    """The collectives that one execution of `program` performs, in the order of its text.

    A computation that is called from several places counts once a call; an asynchronous pair counts
    once. What a worker sends, for an operand of B bytes in groups of n, is what bandwidth-optimal
    algorithms send, rounded up to whole bytes::

        all-to-all, reduce-scatter                  (n - 1) / n B
        all-gather                                  (n - 1) B
        all-reduce                                  2 (n - 1) / n B     (ring)
        collective-permute, collective-broadcast    B, or 0 if n = 1

    Args:
        program: a lowered or a compiled function, or HLO text, such as a compiler's dump.
        mesh: the mesh that the program runs on, for the names of axes.

    Raises:
        ValueError: `program` is nothing of the kind, does not fit `mesh`, or holds a collective
            whose bytes cannot be read from its text (`ragged_all_to_all`).

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
    >>> mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> @jax.jit
    ... @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
    ... def mean(x):
    ...     return jax.lax.pmean(x, "data")
    >>> lowered = mean.lower(jax.ShapeDtypeStruct((800,), jnp.float32))
    >>> [(c.op, c.dtype, c.axis, c.bytes_sent) for c in collectives(lowered, mesh)]
    [('all-reduce', 'f32', 'data', 700)]
    """
    text: Any = program
    if isinstance(program, jax.stages.Lowered):
        text = program.as_text("hlo", debug_info=True)
    elif isinstance(program, jax.stages.Compiled):
        text = program.as_text()
    if not isinstance(text, str) or not (module := hlo.Module(text)).entry:
        raise ValueError(
            f"program is {program!r:.80}; expected a jax.stages.Lowered or Compiled, or HLO text"
        )
    return list(_Walk(module, mesh).walk(module.entry, 1))


def bytes_sent(collectives: Iterable[Collective]) -> int:
    """Bytes that a worker sends in a step: the sum, with the costliest branch of conditionals.

    What is executed once or never counts once: of a training step that was lowered without its
    phase, what all phases send.

    Raises:
        ValueError: one of them is in a loop whose trip count the program does not state.

    >>> bytes_sent([Collective("all-gather", "u8", 10, 4, "data", "", 1, 30)])
    30
    """
    collectives = list(collectives)
    for collective in collectives:
        if collective.executions is None:
            raise ValueError(
                f"executions of the {collective.op} in {collective.where!r} is None: compile the "
                f"program, or give the loop a constant length"
            )
    return _most(collectives)


def table(collectives: Sequence[Collective] | Mapping[str, Sequence[Collective]]) -> str:
    """Plain text: what is sent, by operation, dtype, axis and place, and in total.

    Args:
        collectives: of one program; or of several by name, as `by_phase` returns them.

    >>> print(table([Collective("all-gather", "u8", 500, 4, "data", "", 1, 1500)]))
    collective  dtype  axis  workers  times  a worker sends  bytes
    all-gather  u8     data        4      1          1.5 kB  1,500
    total                                            1.5 kB  1,500
    """
    phases = collectives if isinstance(collectives, Mapping) else {"": collectives}
    header = ["phase", "collective", "dtype", "axis", "workers", "where", "times"]
    rows = [[*header, "a worker sends", "bytes"]]
    for phase, members in phases.items():
        alike: dict[tuple, list[Collective]] = collections.defaultdict(list)
        for c in members:
            alike[c.op, c.dtype, c.axis, c.group_size, c.where, c.executions is None].append(c)
        for (op, dtype, axis, workers, where, unknown), same in alike.items():
            times = "?" if unknown else str(sum(c.executions or 0 for c in same))
            sent = sum(c.bytes_sent for c in same)
            rows.append([phase, op, dtype, axis, str(workers), where, times, *_size(sent)])
        rows.append([phase, "total", "", "", "", "", "", *_size(_most(members))])
    columns = [_aligned(column) for column in zip(*rows, strict=True) if any(column[1:])]
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    everything = list(itertools.chain.from_iterable(phases.values()))
    if any(" branch " in c.where for c in everything):
        lines.append("total: of each conditional, the branch that sends most")
    if any(_ONCE_OR_NEVER in c.where for c in everything):
        lines.append(f"{_ONCE_OR_NEVER}: in a zero- or one-iteration loop; counted once")
    if any(c.executions is None for c in everything):
        lines.append("times ?: in a loop whose trip count the program does not state; counted once")
    return "\n".join(lines)


def _aligned(column: Sequence[str]) -> list[str]:
    """The cells of a column, as wide as the widest: numbers, by its head, end at the right."""
    width = max(map(len, column))
    is_number = column[0] in ("workers", "times", "a worker sends", "bytes")
    return [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]


def by_phase(
    step: Any,
    *args: Any,
    mesh: Mesh | None = None,
    phases: Sequence[str] = ("warmup", "compression"),
    **named: Any,
) -> dict[str, list[Collective]]:
    """The collectives of each phase of a training step, each compiled for itself.

    Args:
        step: what `onebit_jax.train_step` returned.
        *args: the arguments of `step`: arrays, or `jax.ShapeDtypeStruct` with shardings.
        mesh: the mesh that `step` runs on, for the names of axes.
        phases: the optimizer's phases; 1-bit Adam's by default.
        **named: what `step` takes by keyword: `rng`, `model_state`, an optimizer's extra arguments.

    """
    lowered = {phase: step.lower(*args, phase=phase, **named) for phase in phases}
    return {phase: collectives(program.compile(), mesh) for phase, program in lowered.items()}


def _most(collectives: Iterable[Collective]) -> int:
    total = 0
    # What a loop or a branch holds: by site, then by branch ("" for a loop).
    sites: dict[str, dict[str, list[Collective]]] = {}
    for collective in collectives:
        if not collective.where:
            total += collective.bytes_sent
            continue
        frame, _, inner = collective.where.partition(" / ")
        site, _, branch = frame.partition(" branch ")
        branches = sites.setdefault(site, collections.defaultdict(list))
        branches[branch].append(collective._replace(where=inner))
    return total + sum(max(map(_most, branches.values())) for branches in sites.values())


def _size(count: int) -> tuple[str, str]:
    power = min(max(len(str(count)) - 1, 0) // 3, 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{count / 1000**power:.1f} {unit}" if power else f"{count} B", f"{count:,}"


class _Walk:
    """A walk through a module from its entry, which numbers the loops and conditionals it meets."""

    def __init__(self, module: hlo.Module, mesh: Mesh | None):
        self._module = module
        self._mesh = mesh
        self._devices = module.devices or (mesh.size if mesh is not None else None)
        self._loops = self._conditionals = 0

    def walk(self, computation: str, executions: int | None) -> Iterator[Collective]:
        for instruction in self._module.computations[computation].values():
            op = instruction.op
            if op.removesuffix("-start") in hlo.COLLECTIVES:
                yield from self._collectives(computation, instruction, executions)
            elif op == "while" and self._module.at_most_one_turn(instruction):
                [body] = instruction.callees("body")
                yield from _within(_ONCE_OR_NEVER, self.walk(body, executions))
            elif op == "while":
                turns = instruction.trip_count()
                inside: list[Collective] = []
                # The condition is tested once more than the body runs.
                for key, extra in (("condition", 1), ("body", 0)):
                    times = None
                    if turns is not None and executions is not None:
                        times = executions * (turns + extra)
                    [callee] = instruction.callees(key)
                    inside += self.walk(callee, times)
                self._loops += bool(inside)
                yield from _within(f"loop {self._loops}", inside)
            elif op == "conditional":
                branches = instruction.callees("branch_computations") or [
                    *instruction.callees("false_computation"),
                    *instruction.callees("true_computation"),
                ]
                taken = [list(self.walk(callee, executions)) for callee in branches]
                self._conditionals += any(taken)
                for index, inside in enumerate(taken):
                    yield from _within(f"conditional {self._conditionals} branch {index}", inside)
            # Old compilers repeat what an asynchronous operation calls where they wait for it.
            elif not op.endswith(("-done", "-update")):
                for callee in instruction.callees("(?:calls|to_apply|called_computations)"):
                    yield from self.walk(callee, executions)

    def _collectives(
        self, computation: str, instruction: hlo.Instruction, executions: int | None
    ) -> Iterator[Collective]:
        op = instruction.op.removesuffix("-start")
        # TPUs fuse an all-reduce with the slice that follows: what runs is a reduce-scatter.
        if op == "all-reduce" and computation.startswith("all-reduce-scatter"):
            op = "reduce-scatter"
        groups = hlo.groups(op, instruction.attributes, self._devices)
        group_size = max(map(len, groups), default=1)
        axis = _axis(op, groups, self._mesh)
        for dtype, size in self._module.operand_bytes(computation, instruction).items():
            sent = hlo.bytes_sent(op, size, group_size) * (1 if executions is None else executions)
            yield Collective(op, dtype, size, group_size, axis, "", executions, sent)


def _axis(op: str, groups: list[list[int]], mesh: Mesh | None) -> str:
    if mesh is None:
        return "?"
    if max(map(max, groups), default=0) >= mesh.size:
        raise ValueError(
            f"mesh has {mesh.size} devices, but the {op} of the program runs between {groups}"
        )
    wanted = set(map(frozenset, groups))
    for count in range(1, len(mesh.axis_names) + 1):
        for axes in itertools.combinations(range(len(mesh.axis_names)), count):
            parts = set(map(frozenset, hlo.groups_along(mesh.axis_sizes, axes)))
            # A permutation need not connect all workers of an axis.
            inside = all(any(group <= part for part in parts) for group in wanted)
            if wanted == parts or (op == "collective-permute" and inside):
                return ",".join(mesh.axis_names[i] for i in axes)
    return "?"


def _within(frame: str, inside: Iterable[Collective]) -> Iterator[Collective]:
    for collective in inside:
        where = f"{frame} / {collective.where}" if collective.where else frame
        yield collective._replace(where=where)
