"""The hierarchical form: its axes, shards of tensors, and means within a node."""

import jax
import jax.numpy as jnp
import pytest

from onebit_jax.collectives.axes import Axes, bound_axes
from tests.workers import LOCAL, NODE, PAIR, PAIR_BINDINGS, Binding, on_workers

NO_PAIR = [(NODE, NODE), (NODE,), (NODE, LOCAL, "c"), (NODE, None), (1, 2), [*PAIR], None]


def of_axes(axis_name, sizes, binding: Binding = "vmap"):
    """The axes found where these are bound; nothing is compiled."""
    found = []

    def look(x):
        found.append(bound_axes(axis_name))
        return x

    jax.eval_shape(on_workers(look, sizes, binding), jnp.zeros(sizes[0] * sizes[1]))
    return found[0]


@pytest.mark.parametrize(
    ("axis_name", "sizes", "expected"),
    [
        (PAIR, (2, 4), Axes("node", "local", 2, 4)),
        (PAIR, (4, 1), Axes("node", None, 4, 1)),
        (PAIR, (1, 4), Axes("node", "local", 1, 4)),
        (PAIR, (1, 1), Axes("node", "local", 1, 1)),
        ("node", (4, 1), Axes("node", None, 4, 1)),
        (("local", "node"), (2, 4), Axes("local", "node", 4, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("binding", PAIR_BINDINGS)
def test_axes_have_the_sizes_that_are_bound(axis_name, sizes, expected, binding):
    axes = of_axes(axis_name, sizes, binding)
    assert axes == expected
    assert axes.workers == sizes[0] * sizes[1]
    assert axes.single_node == (sizes[0] == 1)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    assert axes.names == names[: len(axes.names)]


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        *[(x, r"^axis_name=.* must be the name of one axis.* or a pair") for x in NO_PAIR],
        (("node", "data"), r"^axis_name=\('node', 'data'\): 'data' is not bound"),
        (("data", "local"), r"^axis_name=\('data', 'local'\): 'data' is not bound"),
        # Along it replicas would go apart, and nobody would be told; unless it has one device.
        ("node", r"^axis_name='node' leaves out the axes \['local'\]"),
    ],
    ids=str,
)
def test_axes_that_cannot_be_are_named(axis_name, message):
    with pytest.raises(ValueError, match=message):
        of_axes(axis_name, (2, 2), "shard_map")
