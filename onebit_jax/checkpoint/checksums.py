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

    Each process checks the parts that it holds. The array may be split otherwise than it was when
    it was saved, as long as each saved part lies within one part now.
    """
    held = {box: part for box, part, _ in _parts(x)}
    wrong = []
    for name, crc in expected.items():
        box = _box(name)
        for outer, part in held.items():
            places = list(zip(outer, box, strict=True))
            if all(a <= c and d <= b for (a, b), (c, d) in places):
                inner = tuple(slice(c - a, d - a) for (a, _), (c, d) in places)
                # On the host: JAX would look for the part on a mesh that the caller has set.
                if _crc(np.asarray(part)[inner]) != crc:
                    wrong.append(name)
                break
    return wrong


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
