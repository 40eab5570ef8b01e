"""Which matmuls a scheduled program puts between a collective's start and its end."""

import pytest

from benchmarks import accelerators, schedules
from benchmarks.schedules import Message, messages

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"

# What XLA printed for 8 x H100, with names and numbers cut short.
GPU = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

%gemm_dw (p: f32[64,32], q: f32[64,32]) -> f32[32,32] {{
  %p = f32[64,32]{{1,0}} parameter(0)
  %q = f32[64,32]{{1,0}} parameter(1)
  ROOT %dot = f32[32,32]{{1,0}} dot(%p, %q), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}

%fused_pack (r: f32[32,32]) -> u8[8,16] {{
  %r = f32[32,32]{{1,0}} parameter(0)
  ROOT %bits = u8[8,16]{{1,0}} convert(%r)
}}

%turn (over: u8[8,16]) -> u8[8,16] {{
  %over = u8[8,16]{{1,0}} parameter(0)
  %all-gather = u8[64,16]{{1,0}} all-gather(%over), channel_id=3, {GROUPS}, dimensions={{0}}, \
use_global_device_ids=true
  ROOT %part = u8[8,16]{{1,0}} slice(%all-gather), slice={{[0:8], [0:16]}}
}}

ENTRY %main (x: f32[64,32], y: f32[64,32]) -> u8[8,16] {{
  %x = f32[64,32]{{1,0}} parameter(0)
  %y = f32[64,32]{{1,0}} parameter(1)
  %gemm.1 = f32[32,32]{{1,0}} fusion(%x, %y), kind=kCustom, calls=%gemm_dw
  %pack.1 = u8[8,16]{{1,0}} fusion(%gemm.1), kind=kLoop, calls=%fused_pack
  %all-to-all-start = ((u8[8,16]{{1,0}}), u8[8,16]{{1,0}}) all-to-all-start(%pack.1), \
channel_id=1, {GROUPS}, dimensions={{0}}
  %gemm.2 = f32[32,32]{{1,0}} fusion(%y, %x), kind=kCustom, calls=%gemm_dw
  %gemm.3 = (f32[32,32]{{1,0}}, s8[64]{{0}}) custom-call(%x, %y), \
custom_call_target="__cublas$lt$matmul"
  %other = f32[64,32]{{1,0}} custom-call(%x), custom_call_target="Sharding"
  %all-to-all-done = u8[8,16]{{1,0}} all-to-all-done(%all-to-all-start)
  %all-to-all-start.1 = ((u8[8,16]{{1,0}}), u8[8,16]{{1,0}}) all-to-all-start(%all-to-all-done), \
channel_id=1, {GROUPS}, dimensions={{0}}
  %all-to-all-done.1 = u8[8,16]{{1,0}} all-to-all-done(%all-to-all-start.1)
  %gemm.4 = f32[32,32]{{1,0}} dot(%x, %y), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT %while = u8[8,16]{{1,0}} while(%all-to-all-done.1), condition=%true, body=%turn
}}
"""

# And for a TPU, which packs bits by convolutions of bytes.
TPU = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[64,32], y: f32[64,32], t: u8[8,8]) -> u8[8,4,128] {{
  %x = f32[64,32]{{1,0:T(8,128)}} parameter(0)
  %y = f32[64,32]{{1,0:T(8,128)}} parameter(1)
  %t = u8[8,8]{{1,0:T(8,128)(4,1)}} parameter(2)
  %bits = u8[8,4,128]{{2,1,0:T(4,128)(4,1)}} convert(%x)
  %all-to-all-start.3 = ((u8[8,4,128]{{2,1,0:T(4,128)(4,1)}}), u8[8,4,128]{{2,1,0:T(4,128)(4,1)}}, \
u32[]{{:S(2)}}, u32[]{{:S(2)}}) all-to-all-start(%bits), channel_id=1, {GROUPS}, dimensions={{0}}
  %conv.1 = f32[32,32]{{1,0:T(8,128)S(1)}} convolution(%x, %y), dim_labels=fb_io->bf
  %conv.2 = u8[8,8]{{1,0:T(8,128)(4,1)S(1)}} convolution(%t, %t), dim_labels=bf_io->bf
  ROOT %all-to-all-done.3 = u8[8,4,128]{{2,1,0:T(4,128)(4,1)}} all-to-all-done(%all-to-all-start.3)
}}
"""


def test_gemms_are_counted_between_start_and_end():
    found, gemms = messages(GPU)
    assert gemms == 4
    assert found == [
        Message("all-to-all", 112, before=1, between=2),
        Message("all-to-all", 112, before=3, between=0),
        Message("all-gather", 7 * 128, before=4, between=0),
    ]


def test_convolutions_of_bytes_are_no_gemms():
    assert messages(TPU) == ([Message("all-to-all", 7 * 512, before=0, between=1)], 1)


def test_a_program_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match=r"^text is of a program that is not scheduled"):
        messages(GPU.replace(", is_scheduled=true", ""))


@pytest.fixture(scope="module")
def schedule_of(shared_dir):
    """Compiles a kind by a set of flags; skips where the target's plug-ins are not installed."""
    options = schedules.Options(target_config=shared_dir / "h100.txtpb")
    kinds = schedules.kinds(options.bucket_bytes)

    def make(target, name, flags):
        if missing := accelerators.missing_plugins(target):
            pytest.skip(missing)
        asked = accelerators.Options(target=target, target_config=options.target_config)
        mesh = accelerators.make_mesh(target, accelerators.check(asked))
        told = schedules.FLAGS[target][flags]
        return schedules.schedule(kinds[name], options, mesh, told)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["default flags", "latency-hiding scheduler"])
def test_buckets_travel_behind_gemms_on_gpus(flags, schedule_of):
    """All but the last, which waits for the first layer's gradient, and the server's answer."""
    found = schedule_of("h100", "1-bit Adam, buckets", flags)
    assert found["GEMMs"] == 23
    behind = [(row["op"], row["between"] > 0) for row in found["rows"]]
    assert behind == [("all-to-all", True)] * 3 + [("all-to-all", False), ("all-gather", False)]
    # Together they cannot leave before the first layer's gradient is there.
    assert schedule_of("h100", "1-bit Adam", flags)["behind GEMMs"] == 0


@pytest.mark.slow
def test_a_tpu_sends_the_first_bucket_behind_gemms_if_told_to(schedule_of):
    apart = "async all-to-all, tensors apart"
    found = schedule_of("v5e", "1-bit Adam, buckets", apart)
    assert found["rows"][0]["op"] == "all-to-all"
    assert found["rows"][0]["between"] > 0
    assert schedule_of("v5e", "1-bit Adam, buckets", "default flags")["behind GEMMs"] == 0
