"""What the processes of a group tell one another, and how it is put in words."""

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

# The exit code of a process that failed, where nobody gives another.
FAILED = 1
# Bytes of a message, of which a stranger may send any number.
LONGEST = 2**20
_NAMED = 8
# Characters of a value, of a text, and of all values as JSON, in which one takes 12 bytes at most.
_LONGEST_VALUE, _LONGEST_TEXT, _LONGEST_SAID = 1000, 10_000, 500_000


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


def check_same(same: Any) -> None:
    """Raises ``ValueError`` unless processes can compare these values, which are text.

    >>> check_same({"learning rate": 1e-3})
    Traceback (most recent call last):
    ValueError: same has 'learning rate': 0.001, of types str and float, but names and values ...
    """
    if not isinstance(same, Mapping):
        raise ValueError(
            f"same={reprlib.repr(same)} must be a dict of values under names, all of them str, "
            "such as {'learning rate': '1e-3'}."
        )
    for name, value in same.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ValueError(
                f"same has {reprlib.repr(name)}: {reprlib.repr(value)}, of types "
                f"{type(name).__name__} and {type(value).__name__}, but names and values that "
                "processes compare must be str: give str(value), or repr(value)."
            )


def as_said(same: Mapping[str, str]) -> dict[str, str]:
    """What a process tells of its values: of long ones the beginning and a digest.

    Raises:
      ValueError: they are too many for a message.
    """
    said = {_digested(name): _digested(value) for name, value in same.items()}
    if (size := len(json.dumps(said))) > _LONGEST_SAID:
        raise ValueError(
            f"same has {len(said)} names and values, {size} bytes of JSON, but processes "
            f"compare {_LONGEST_SAID} at most: give a digest of several values under one name."
        )
    return said


def _digested(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    digest = hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()
    return f"{value[:100]}... ({len(value)} characters, SHA-256 {digest[:16]})"


def shortened(text: str) -> str:
    """The beginning of a text that may be too long for a message.

    >>> shortened("disk full"), shortened("x" * 99_999)[-30:]
    ('disk full', 'xxxxxxx... (99999 characters)')
    """
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"


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
    return f"{shortened('; '.join(found))}; give all processes the same" if found else None
