"""What the processes of a group tell one another, and how it is put in words."""

from collections.abc import Iterable, Mapping
from typing import Any

# The exit code of a process that failed, where nobody gives another.
FAILED = 1
_NAMED = 8


def is_message(message: Any) -> bool:
    """Whether a process of a group sends this, rather than a stranger at the same port.

    >>> is_message({"said": {"--seed": "7"}}), is_message(5), is_message({"end": "", "code": 0})
    (True, False, False)
    """
    match message:
        case {"id": int(), "count": int(), "host": str(), **rest} if not rest:
            return type(message["id"]) is type(message["count"]) is int
        case {"said": dict(said), **rest} if not rest:
            return all(isinstance(value, str) for value in said.values())
        case {"stopped": str(), "code": int(code), **rest} if not rest:
            return 0 < code < 256
        case {"end": str(), "code": int(code), **rest} if not rest:
            return 0 < code < 256
        case {"calls": int(), "seconds": float() | int(), "line": str(), **rest} if not rest:
            return True
        case {"refused": str(), **rest} | {"left": int(), **rest} if not rest:
            return True
        case {"agreed": True} | {"stalled": True} | {"report": True} | {"done": True}:
            return len(message) == 1
    return False


def named(ids: Iterable[int]) -> str:
    """Says which processes.

    >>> named([1]), named({2, 0}), named(range(64))
    ('process 1', 'processes 0, 2', 'processes 0, 1, 2, 3, 4, 5, 6, 7 and 56 more')
    """
    ids = sorted(ids)
    listed = ", ".join(map(str, ids[:_NAMED]))
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"process{'es' if len(ids) > 1 else ''} {listed}{more}"


def by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """The processes that have each value, in order.

    >>> by_value({1: "a", 0: "a", 2: "b"})
    {'a': [0, 1], 'b': [2]}
    """
    having: dict[str, list[int]] = {}
    for index in sorted(values):
        having.setdefault(values[index], []).append(index)
    return having


def differing(said: Mapping[int, Mapping[str, str]]) -> str | None:
    """The names whose values are not the same on all processes; None if all are.

    >>> differing({0: {"--seeds": "0"}, 1: {"--seeds": "1"}})
    '--seeds: 0 on process 0, 1 on process 1; give all processes the same'
    """
    found = []
    for name in dict.fromkeys(name for own in said.values() for name in own):
        having = by_value({index: own.get(name, "nothing") for index, own in said.items()})
        if len(having) > 1:
            values = ", ".join(f"{value} on {named(ids)}" for value, ids in having.items())
            found.append(f"{name}: {values}")
    return f"{'; '.join(found)}; give all processes the same" if found else None
