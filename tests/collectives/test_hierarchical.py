"""The hierarchical form: its axes, shards of tensors, and means within a node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import Axes, bound_axes, bound_axis_size
from tests.workers import LOCAL, NODE, PAIR, PAIR_BINDINGS, Binding, on_workers

AXES = Axes(NODE, LOCAL, 2, 2)


def of_axes(call, sizes, binding: Binding = "vmap"):
    """What `call` finds where these axes are bound; nothing is compiled."""
    found = []

    def look(x):
        found.append(call())
        return x

    jax.eval_shape(on_workers(look, sizes, binding), jnp.zeros(sizes[0] * sizes[1]))
    return found[0]


# Shards.


def test_shards_are_those_of_the_flat_layout_for_all_devices():
    """Device 1 of node 0 stands for it in the second half of a tensor padded to whole bytes."""
    shapes = [(9,), (64, 3)]
    values = [np.arange(4.0 * np.prod(s), dtype=np.float32).reshape(4, *s) for s in shapes]
    shards = hierarchical.shard_shapes(shapes, AXES)
    assert shards == [(16,), (32, 3)]
    own = on_workers(
        lambda values: hierarchical.reduce_scatter(values, shards, AXES, "float32"), (2, 2)
    )(values)
    for ours, z, shard in zip(own, values, shards, strict=True):
        node = z[:2].mean(0)
        node = np.pad(node.reshape(-1), (0, 2 * np.prod(shard) - node.size))
        np.testing.assert_allclose(ours[1], node.reshape(2, *shard)[1], rtol=1e-6)


def test_gathered_sections_are_those_of_whole_tensors():
    sections = [np.arange(4 * 2 * k, dtype=np.uint8).reshape(4, 2, k) for k in (3, 5)]

    def gather(sections):
        return hierarchical.all_gather_sections(sections, AXES)

    for ours, section in zip(on_workers(gather, (2, 2))(sections), sections, strict=True):
        np.testing.assert_array_equal(ours[0], section[:2])
        np.testing.assert_array_equal(ours[3], section[2:])


# The axes.


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
    axes = of_axes(lambda: bound_axes(axis_name), sizes, binding)
    assert axes == expected
    assert axes.workers == sizes[0] * sizes[1]
    assert axes.single_node == (sizes[0] == 1)
    assert (
        axes.names == ((axis_name,) if isinstance(axis_name, str) else axis_name)[: len(axes.names)]
    )


@pytest.mark.parametrize(
    "axis_name",
    [("node", "node"), ("node",), ("node", "local", "more"), ("node", None), (1, 2), [*PAIR], None],
    ids=str,
)
def test_what_is_no_pair_of_axes_is_named(axis_name):
    with pytest.raises(ValueError, match=r"^axis_name=.* must be the name of one axis.* or a pair"):
        of_axes(lambda: bound_axes(axis_name), (2, 2))


def test_a_pair_is_not_one_axis():
    assert of_axes(lambda: bound_axis_size("local"), (2, 3)) == 3
    with pytest.raises(ValueError, match=r"^axis_name=\('node', 'local'\) must be the name of one"):
        of_axes(lambda: bound_axis_size(PAIR), (2, 2))


@pytest.mark.parametrize(
    ("axis_name", "missing"), [(("node", "data"), "data"), (("data", "local"), "data")], ids=str
)
@pytest.mark.parametrize("binding", PAIR_BINDINGS)
def test_an_axis_of_a_pair_that_is_not_bound_is_named(axis_name, missing, binding):
    message = rf"^axis_name=\('{axis_name[0]}', '{axis_name[1]}'\): '{missing}' is not bound"
    with pytest.raises(ValueError, match=message):
        of_axes(lambda: bound_axes(axis_name), (2, 2), binding)


def test_an_axis_that_is_left_out_is_named():
    """Along it replicas would go apart, and nobody would be told; unless it has one device."""
    with pytest.raises(ValueError, match=r"^axis_name='node' leaves out the axes \['local'\]"):
        of_axes(lambda: bound_axes("node"), (2, 2), "shard_map")
    assert of_axes(lambda: bound_axes("node"), (2, 1), "shard_map").nodes == 2
