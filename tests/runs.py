"""Numbers of workers, flat or by nodes, as tests of both say them."""

from jax.sharding import AbstractMesh, AxisType

from tests.workers import AXIS, PAIR

Sizes = int | tuple[int, int]


def axis_of(sizes: Sizes) -> str | tuple[str, str]:
    """What an optimizer for these workers is told."""
    return AXIS if isinstance(sizes, int) else PAIR


def mesh_of(sizes: Sizes) -> AbstractMesh:
    """The mesh that they lie on, for its size and the names of its axes."""
    axes, form = ((AXIS,), (sizes,)) if isinstance(sizes, int) else (PAIR, sizes)
    return AbstractMesh(form, axes, axis_types=(AxisType.Auto,) * len(axes))
