"""Programs as XLA prints them, for every kind of device and in every form of groups."""

import jax
import pytest
from jax.sharding import AxisType

from onebit_jax import wire


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


# As XLA prints programs for GPUs: asynchronous pairs, wrapped computations, tuples.
GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped_a2a (param_0: u8[8,16]) -> u8[8,16] {
  %param_0 = u8[8,16]{1,0} parameter(0)
  ROOT %a2a = u8[8,16]{1,0} all-to-all(%param_0), channel_id=1, replica_groups=[1,8]<=[8], \
dimensions={0}
}

%wrapped_slice (param_1: f32[16]) -> f32[2] {
  %param_1 = f32[16]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%param_1), channel_id=7, replica_groups=[1,8]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

ENTRY %main (x: u8[8,16], y: f32[16], z: bf16[4]) -> u8[8] {
  %x = u8[8,16]{1,0} parameter(0)
  %y = f32[16]{0} parameter(1)
  %z = bf16[4]{0} parameter(2)
  %a2a-start = ((u8[8,16]{1,0}), u8[8,16]{1,0}) async-start(%x), calls=%wrapped_a2a
  %a2a-done = u8[8,16]{1,0} async-done(%a2a-start), calls=%wrapped_a2a
  %sugar-start = ((u8[8,16]{1,0}), u8[8,16]{1,0}) all-to-all-start(u8[8,16]{1,0} %x), \
channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %sugar-done = u8[8,16]{1,0} all-to-all-done(%sugar-start)
  %ag-start = (u8[8,16]{1,0}, u8[16,16]{1,0}) all-gather-start(%a2a-done), channel_id=3, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %ag-done = u8[16,16]{1,0} all-gather-done(%ag-start)
  %ar-start = (f32[16]{0}, /*index=1*/bf16[4]{0}) all-reduce-start(%y, /*index=1*/%z), \
channel_id=4, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add
  %ar-done = (f32[16]{0}, bf16[4]{0}) all-reduce-done(%ar-start)
  %cp-start = (f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=5, \
source_target_pairs={{0,4},{4,0}}
  %cp-done = f32[16]{0} collective-permute-done(%cp-start)
  %fused = f32[2]{0} fusion(%y), kind=kCustom, calls=%wrapped_slice
  ROOT %out = u8[8]{0} bitcast(%ag-done)
}
"""


def test_programs_for_gpus(mesh):
    found = wire.collectives(GPU, mesh)
    assert [(c.op, c.dtype, c.axis, c.operand_bytes, c.bytes_sent) for c in found] == [
        ("all-to-all", "u8", "node,local", 128, 112),
        ("all-to-all", "u8", "node,local", 128, 112),
        ("all-gather", "u8", "node", 128, 128),
        ("all-reduce", "f32", "local", 64, 96),
        ("all-reduce", "bf16", "local", 8, 12),
        ("collective-permute", "f32", "node", 64, 64),
        ("reduce-scatter", "f32", "node,local", 64, 56),
    ]


# As XLA prints programs for TPUs: tiled layouts; a reduce-scatter is an all-reduce inside a fusion.
TPU = """HloModule jit_step, num_partitions=8

%all-reduce-scatter.3 (p: f32[1024]) -> f32[128] {
  %p = f32[1024]{0:T(1024)S(1)} parameter(0)
  %all-reduce.1 = f32[1024]{0:T(1024)} all-reduce(f32[1024]{0:T(1024)S(1)} %p), channel_id=1, \
replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  ROOT %slice = f32[128]{0:T(128)} dynamic-slice(%all-reduce.1, %index)
}

%quarter (q: (s4[10,100])) -> (s4[10,100]) {
  %q = (s4[10,100]{1,0:T(8,128)(8,1)E(4)}) parameter(0)
  %q0 = s4[10,100]{1,0:T(8,128)(8,1)E(4)} get-tuple-element(%q), index=0
  %cb = s4[10,100]{1,0:T(8,128)(8,1)E(4)} collective-broadcast(%q0), channel_id=2, \
replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %t = (s4[10,100]{1,0:T(8,128)(8,1)E(4)}) tuple(%cb)
}

%half (r: (s4[10,100])) -> (s4[10,100]) {
  %r = (s4[10,100]{1,0}) parameter(0)
  %r0 = s4[10,100]{1,0} get-tuple-element(%r), index=0
  %cb2 = s4[10,100]{1,0} collective-broadcast(%r0), channel_id=2, \
replica_groups={{0,1,2,3},{4,5,6,7}}
  ROOT %t2 = (s4[10,100]{1,0}) tuple(%cb2)
}

ENTRY %main (x: f32[1024], flag: pred[], y: (s4[10,100])) -> f32[128] {
  %x = f32[1024]{0:T(1024)} parameter(0)
  %flag = pred[]{:T(512)} parameter(1)
  %y = (s4[10,100]{1,0}) parameter(2)
  %c = (s4[10,100]{1,0}) conditional(%flag, %y, %y), true_computation=%half, \
false_computation=%quarter
  ROOT %f = f32[128]{0:T(128)} fusion(f32[1024]{0:T(1024)} %x), kind=kCustom, \
calls=%all-reduce-scatter.3
}
"""


def test_programs_for_tpus(mesh):
    assert [(c.op, c.dtype, c.where, c.bytes_sent) for c in wire.collectives(TPU, mesh)] == [
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
    with pytest.raises(ValueError, match=r"mesh is None .* give the mesh"):
        wire.collectives(text)
    assert wire.collectives(text, mesh)[0].group_size == 8


def test_replica_groups_of_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match=r"replica_groups=<new> of the all-reduce .* expected"):
        wire.collectives(one_operation("all-reduce(p), replica_groups=<new>"))


def test_a_collective_of_unknown_size_is_refused(mesh):
    line = "ragged-all-to-all(p, p, p, p, p, p), channel_id=1, replica_groups={{0,1}}"
    with pytest.raises(ValueError, match=r"ragged-all-to-all, whose bytes depend on its data"):
        wire.collectives(one_operation(line), mesh)
