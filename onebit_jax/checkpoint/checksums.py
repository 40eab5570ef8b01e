"""Checksums of arrays, one for each part that a device holds.

A part is named by its place: ``"0:1,0:3"`` is the first worker's row of an array ``[4, 3]``. An
array that all devices hold has one part. Every process computes those of its devices.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from onebit_jax.markers import is_key

Box = tuple[tuple[int, int], ...]


def checksums(x: Any) -> dict[str, int]:
    """The CRC-32 of each part of an array that this process answers for.

    Args:
      x: an array of JAX's or NumPy's, random keys too, or a number.

    >>> checksums(np.arange(3, dtype=np.int32))
    {'0:3': 494276218}
    """
    return {_name(box): _crc(part) for box, part, replica in _parts(x) if replica == 0}


def differing(x: Any, expected: Mapping[str, int]) -> list[str]:
    """Names the parts of an array whose checksums are not the given ones.

    The array may be split otherwise than it was when it was saved. Each process checks the saved
    parts of which it holds all.
    """
    held = {box: part for box, part, _ in _parts(x)}
    found = {name: _assembled(_box(name), held) for name in expected}
    return [
        name for name, part in found.items() if part is not None and _crc(part) != expected[name]
    ]


def _assembled(box: Box, held: Mapping[Box, Any]) -> Any:
    """The part of an array at a place, from parts elsewhere; None if they do not cover it."""
    whole, covered = None, 0
    for outer, part in held.items():
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(outer, box, strict=True)]
        if any(a > b or (a == b and c < d) for (a, b), (c, d) in zip(common, box, strict=True)):
            continue
        inner = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, outer, strict=True))
        # On the host: JAX would look for the part on a mesh that the caller has set.
        own = np.asarray(part)[inner]
        if tuple(common) == box:
            return own
        if whole is None:
            whole = np.empty([stop - start for start, stop in box], own.dtype)
        at = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
        whole[at] = own
        covered += own.size
    return whole if whole is not None and covered == whole.size else None


def _parts(x: Any) -> Iterator[tuple[Box, Any, int]]:
    """The parts that this process has: where each lies, its values, and the number of this copy."""
    if is_key(x):
        x = jax.random.key_data(x)
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        yield tuple((0, n) for n in x.shape), x, jax.process_index()
        return
    for shard in x.addressable_shards:
        places = zip(shard.index, x.shape, strict=True)
        yield tuple(s.indices(n)[:2] for s, n in places), shard.data, shard.replica_id


def _crc(x: Any) -> int:
    host = np.ascontiguousarray(np.asarray(x))
    return zlib.crc32(host.reshape(-1).view(np.uint8).data) if host.size else 0


def _name(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in box)


def _box(name: str) -> Box:
    pairs = (part.split(":") for part in name.split(",") if part)
    return tuple((int(start), int(stop)) for start, stop in pairs)
