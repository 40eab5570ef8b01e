"""Devices of several TPU slices, as far as the making of a mesh looks at them."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a slice."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "of a test"  # a TPU's chips have coordinates too
    device_kind: str = "of a test"


def devices_of_slices(count: int, slices: int) -> list[Any]:
    """The devices of slices, which alternate."""
    return [Device(i, i % slices) for i in range(count)]
