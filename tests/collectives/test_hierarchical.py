"""The hierarchical form: its axes, shards of tensors, and means within a node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import Axes, bound_axes
from tests.workers import LOCAL, NODE, PAIR, PAIR_BINDINGS, Binding, on_workers

AXES = Axes(NODE, LOCAL, 2, 2)
NO_PAIR = [(NODE, NODE), (NODE,), (NODE, LOCAL, "c"), (NODE, None), (1, 2), [*PAIR], None]


def of_axes(axis_name, sizes, binding: Binding = "vmap"):
    """The axes found where these are bound; nothing is compiled."""
    found = []

    def look(x):
        found.append(bound_axes(axis_name))
        return x

    jax.eval_shape(on_workers(look, sizes, binding), jnp.zeros(sizes[0] * sizes[1]))
    return found[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_1_stands_for_its_node_in_the_second_half_of_a_tensor(dtype):
    """Which is padded; an empty one scatters nothing."""
    shapes, shards = [(9,), (64, 3), (0, 3)], [(16,), (32, 3), (0, 3)]
    values = [np.arange(4.0 * np.prod(s), dtype=np.float32).reshape(4, *s) for s in shapes]

    def own(values):
        return hierarchical.reduce_scatter(values, shards, AXES, dtype)

    for ours, z, shard in zip(on_workers(own, (2, 2))(values), values, shards, strict=True):
        assert ours.dtype == jnp.float32
        node = z[:2].mean(0)
        node = np.pad(node.reshape(-1), (0, 2 * np.prod(shard) - node.size))
        expected = node.reshape(2, *shard)[1]
        np.testing.assert_allclose(ours[1], expected, rtol=1e-6 if dtype == "float32" else 2**-7)


def test_what_is_gathered_is_of_whole_tensors():
    x = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    whole = on_workers(lambda x: hierarchical.all_gather(x, AXES), (2, 2))(x)
    np.testing.assert_array_equal(whole[0], x[:2])
    np.testing.assert_array_equal(whole[3], x[2:])


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
