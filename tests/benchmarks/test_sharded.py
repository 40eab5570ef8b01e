"""What a program for two TPU slices sends between them."""

from benchmarks.sharded import between_slices

# What XLA printed, with names and attributes cut short.
PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (bits: u8[1,1,31232], norms: f32[1,2,128]) -> token[] {
  %bits = u8[1,1,31232]{2,1,0:T(4,128)(4,1)} parameter(0)
  %norms = f32[1,2,128]{2,1,0:T(2,128)} parameter(1)
  %after-all = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="psum.29_0"}
  %send = (f32[1,2,128]{2,1,0:T(2,128)}, u32[], token[]) send(%norms, %after-all), channel_id=3, \
is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[1,2,128]{2,1,0:T(2,128)}, u32[], token[]) recv(%after-all), channel_id=2, \
is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.1 = (u8[1,1,31232]{2,1,0:T(4,128)(4,1)}, u32[], token[]) send(%bits, %after-all), \
channel_id=4, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_GATHER"}
  %send.2 = (u8[8]{0}, u32[], token[]) send(%bits, %after-all), channel_id=5, is_host_transfer=true
  ROOT %send-done = token[] send-done(%send.1), channel_id=4, is_host_transfer=true
}
"""


def test_transfers_between_slices_are_read_with_the_collective_they_stand_for():
    found = between_slices(PROGRAM)
    assert [(c.op, c.dtype, c.axis, c.bytes_sent) for c in found] == [
        ("all-reduce", "f32", "data", 1024),
        ("all-gather", "u8", "data", 31232),
    ]
