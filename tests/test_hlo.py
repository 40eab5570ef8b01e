"""Programs as XLA prints them, for every kind of device and in every form of groups."""

import pathlib

import jax
import pytest
from jax.sharding import AxisType

from onebit_jax import wire

DATA = pathlib.Path(__file__).with_name("data")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("node", "local"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "local"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "node"),
        ("{{3,1,2,0},{7,6,5,4}}", "local"),
        ("{}", "node,local"),
        ("[2,4]<=[8]", "local"),
        ("[1,8]<=[8]", "node,local"),
        ("[4,2]<=[2,4]T(1,0)", "node"),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", "local"),
        ("mesh['a'=2,'b'=2,'c'=2] {'b','c'}", "local"),
        ("mesh['a'=8] {'a'}", "node,local"),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", "local"),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", "node"),
        ("{{0,7},{1,6},{2,5},{3,4}}", "?"),
    ],
)
def test_every_form_of_replica_groups(mesh, groups, axis):
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: u8[100]) -> u8[100] {{
  %p = u8[100]{{0}} parameter(0)
  ROOT %ag = u8[800]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}, \
use_global_device_ids=true, metadata={{op_name="a, calls=%b replica_groups={{{{0}}}}"}}
}}
"""
    sizes = {"local": 4, "node": 2, "node,local": 8, "?": 2}
    [found] = wire.collectives(text, mesh)
    assert (found.axis, found.group_size) == (axis, sizes[axis])
    assert found.bytes_sent == (sizes[axis] - 1) * 100


def test_groups_of_replicas_stand_for_all_their_partitions(mesh):
    text = """HloModule m, num_partitions=8

ENTRY main {
  p = f32[2]{0} parameter(0)
  ROOT ar = f32[2]{0} all-reduce(p), channel_id=1, replica_groups={{0}}, to_apply=add
}
"""
    [found] = wire.collectives(text, mesh)
    assert (found.axis, found.bytes_sent) == ("node,local", 14)


def test_programs_for_gpus(mesh):
    """With asynchronous pairs, wrapped computations, tuples."""
    found = wire.collectives((DATA / "gpu.hlo").read_text(), mesh)
    assert [(c.op, c.dtype, c.axis, c.operand_bytes, c.bytes_sent) for c in found] == [
        ("all-to-all", "u8", "node,local", 128, 112),
        ("all-to-all", "u8", "node,local", 128, 112),
        ("all-gather", "u8", "node", 128, 128),
        ("all-reduce", "f32", "local", 64, 96),
        ("all-reduce", "bf16", "local", 8, 12),
        ("collective-permute", "f32", "node", 64, 64),
        ("reduce-scatter", "f32", "node,local", 64, 56),
    ]


def test_programs_for_tpus(mesh):
    """With tiled layouts; a reduce-scatter is an all-reduce inside a fusion."""
    found = wire.collectives((DATA / "tpu.hlo").read_text(), mesh)
    assert [(c.op, c.dtype, c.where, c.bytes_sent) for c in found] == [
        ("collective-broadcast", "s4", "conditional 1 branch 0", 500),
        ("collective-broadcast", "s4", "conditional 1 branch 1", 1000),
        ("reduce-scatter", "f32", "", 3584),
    ]


def one_operation(line):
    return f"""HloModule m

ENTRY main {{
  p = f32[8]{{0}} parameter(0)
  ROOT r = f32[8]{{0}} {line}
}}
"""


def test_groups_of_all_devices_need_to_know_how_many(mesh):
    text = one_operation("all-reduce(p), replica_groups={}, to_apply=add")
    with pytest.raises(ValueError, match="give mesh"):
        wire.collectives(text)
    assert wire.collectives(text, mesh)[0].group_size == 8


def test_replica_groups_of_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match="replica_groups=<new> of the all-reduce"):
        wire.collectives(one_operation("all-reduce(p), replica_groups=<new>"))


def test_a_collective_of_unknown_size_is_refused(mesh):
    line = "ragged-all-to-all(p, p, p, p, p, p), channel_id=1, replica_groups={{0,1}}"
    with pytest.raises(ValueError, match=r"ragged-all-to-all, whose bytes depend on its data"):
        wire.collectives(one_operation(line), mesh)
