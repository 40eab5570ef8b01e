"""Parses the text of HLO modules: computations, loops, and which devices exchange what."""

import collections
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_OF_ALL = frozenset(("all-gather", "all-reduce", "all-to-all", "reduce-scatter"))
COLLECTIVES = _OF_ALL | {"collective-broadcast", "collective-permute", "ragged-all-to-all"}

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w\-]*)"
    r"\((?P<operands>.*?)\)(?P<attributes>$|, .*)"
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<shape>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
        type: of its result, an array or a tuple.
        op: such as "all-reduce" or "while".
        operands: the names of its operands, which are in the same computation.
        attributes: the text after them.
    """

    type: str
    op: str
    operands: list[str]
    attributes: str

    def callees(self, key: str) -> list[str]:
        """The computations that an attribute such as `body=%a` or `calls={%a, %b}` names.

        Args:
            key: the attribute's name, a regular expression.
        """
        found = re.search(rf", {key}=(?:\{{([^}}]*)\}}|([^\s,]+))", self.attributes)
        names = (found[1] or found[2]).split(",") if found else []
        return [name.strip().lstrip("%") for name in names]

    def trip_count(self) -> int | None:
        """How often a loop's body runs, if the program states it."""
        stated = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', self.attributes)
        return int(stated[1]) if stated else None


class Module:
    """A module, split into computations.

    Attributes:
        entry: the name of the computation that runs; "" if the text is no module.
        computations: the instructions of each, by name.
        devices: how many devices the program runs on; None if it does not say.
    """

    def __init__(self, text: str):
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, Instruction] = {}
        computation, current = "", {}
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if match := _COMPUTATION.match(line):
                computation = match["name"]
                current = self.computations[computation] = {}
                if match["entry"]:
                    self.entry = computation
            elif match := _INSTRUCTION.match(line):
                # Operands may carry their types in front; names come last.
                operands = [o.split()[-1].lstrip("%") for o in match["operands"].split(", ") if o]
                instruction = Instruction(match["type"], match["op"], operands, match["attributes"])
                current[match["name"]] = instruction
                if match["root"]:
                    self._roots[computation] = instruction
        # Programs that are only lowered do not print how many devices they are for.
        header = re.search(r"^HloModule .*", text, re.MULTILINE)
        counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", header[0] if header else "")
        self.devices = math.prod(map(int, counts)) if counts else None

    def at_most_one_turn(self, loop: Instruction) -> bool:
        """Whether the body always makes the condition false, as in ``overwrite_if``."""
        [condition], [body] = loop.callees("condition"), loop.callees("body")
        tested, left = self._roots[condition], self._roots[body]
        place = re.match(r", index=(\d+)", tested.attributes)
        if tested.op != "get-tuple-element" or left.op != "tuple" or not place:
            return False
        value = self.computations[body][left.operands[int(place[1])]]
        while value.op == "copy":
            value = self.computations[body][value.operands[0]]
        return value.op == "constant" and value.operands == ["false"]

    def operand_bytes(self, computation: str, instruction: Instruction) -> dict[str, int]:
        """The size of an instruction's operands, by HLO's names for their dtypes."""
        sizes: dict[str, int] = collections.defaultdict(int)
        for name in instruction.operands:
            for array in _ARRAY.finditer(self.computations[computation][name].type):
                sizes[array["dtype"]] += _array_bytes(array)
        return sizes


def _array_bytes(array: re.Match[str]) -> int:
    """Bytes of an array; elements below a byte take one byte unless the layout packs them."""
    packed = re.search(r"E\((\d+)\)", array["layout"] or "")
    width = re.search(r"\d+", array["dtype"])
    bits = int(packed[1]) if packed else max(8, int(width[0]) if width else 8)
    elements = math.prod(int(size.lstrip("<=")) for size in array["shape"].split(",") if size)
    return -(-elements * bits // 8)


def bytes_sent(op: str, operand_bytes: int, group_size: int) -> int:
    """What a device sends by bandwidth-optimal algorithms; see :func:`..wire.collectives`.

    Args:
        op: the collective, without "-start".
        operand_bytes: size of one device's operand.
        group_size: how many devices take part together.

    Raises:
        ValueError: for a collective whose bytes depend on its data.

    >>> bytes_sent("all-reduce", 800, 8)
    1400
    """
    others = group_size - 1
    match op:
        case "all-to-all" | "reduce-scatter":
            return -(-others * operand_bytes // group_size)
        case "all-gather":
            return others * operand_bytes
        case "all-reduce":
            return -(-2 * others * operand_bytes // group_size)
        case "collective-permute" | "collective-broadcast":
            return operand_bytes if others else 0
    raise ValueError(f"the program holds a {op}, whose bytes depend on its data and are unknown")


# Positions 0, 1, ... in this shape, and the order in which its axes are then transposed.
_TILES = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def groups(op: str, attributes: str, devices: int | None) -> list[list[int]]:
    """The groups of devices that exchange, by position in the program's device assignment.

    Args:
        op: the collective, without "-start".
        attributes: its attributes.
        devices: how many devices the program runs on; None if that is not known.

    Raises:
        ValueError: ``devices`` is None but needed, or the groups have an unknown form.
    """
    if op == "collective-permute":
        return _connected(_lists(attributes.partition("source_target_pairs=")[2]))
    # Without global ids these name replicas, each with all its partitions; JAX has one replica.
    whole_replicas = (
        op in ("all-gather", "all-reduce", "reduce-scatter")
        and "channel_id=" in attributes
        and "use_global_device_ids=true" not in attributes
    )
    text = attributes.partition("replica_groups=")[2] or "{}"
    if whole_replicas or text.startswith("{}"):
        if devices is None:
            raise ValueError(f"give mesh: {op} runs on all devices, whose number is unknown")
        return [list(range(devices))]
    if text.startswith("{{"):
        return _lists(text)
    if match := re.match(rf"\[([\d,]+)\]<={_TILES}", text):
        return _positions(*match.groups()[1:]).reshape(_integers(match[1])).tolist()
    axes = r"\{((?:'[^']*',?)*)\}"
    if match := re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\({_TILES}\))? {axes}", text):
        sizes = {name: int(size) for name, size in re.findall(r"('[^']*')=(\d+)", match[1])}
        names = list(sizes)
        axes = [names.index(name) for name in match[4].split(",") if name]
        found = np.asarray(groups_along(tuple(sizes.values()), axes))
        return (_positions(match[2], match[3]).reshape(-1)[found] if match[2] else found).tolist()
    raise ValueError(f"replica_groups={text:.60} of the {op} is in no known form")


def _integers(text: str | None) -> list[int]:
    return [int(i) for i in (text or "").split(",") if i]


def _positions(tiles: str, order: str | None) -> np.ndarray:
    shape = _integers(tiles)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_integers(order) or None)


def groups_along(sizes: Sequence[int], axes: Sequence[int]) -> list[list[int]]:
    """The groups of positions in a mesh of these sizes that differ along `axes` only.

    >>> groups_along((2, 3), [0])
    [[0, 3], [1, 4], [2, 5]]
    """
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    positions = np.arange(math.prod(sizes)).reshape(sizes).transpose(*rest, *axes)
    return positions.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()


def _lists(text: str) -> list[list[int]]:
    """`{{0,1},{2,3}}` at the start of the text, as lists."""
    lists = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
    found = re.findall(r"\{([\d,]+)\}", lists[0] if lists else "")
    return [[int(member) for member in group.split(",")] for group in found]


def _connected(pairs: list[list[int]]) -> list[list[int]]:
    joined: list[set[int]] = []
    for pair in map(set, pairs):
        touched = [group for group in joined if group & pair]
        joined = [group for group in joined if not group & pair] + [pair.union(*touched)]
    return [sorted(group) for group in joined]
