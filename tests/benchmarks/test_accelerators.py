"""What crosses on GPUs and TPUs, from programs compiled without them; plug-ins may be missing."""

import pathlib

import pytest

from benchmarks import accelerators, tasks
from benchmarks.kernels import Launches, launches
from benchmarks.kinds import for_compilers
from benchmarks.loops import Run
from benchmarks.sharded import between_slices
from onebit_jax.programs.wire import Collective

# What XLA printed, with names and numbers cut short.
DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
ELEMENTS = 2**20


@pytest.fixture(scope="module")
def mesh_of(shared_dir):
    """Makes the mesh of a target; skips where its plug-in is not installed."""

    def make(target):
        pytest.importorskip({"h100": "jax_cuda12_plugin", "v5e": "libtpu"}[target])
        return accelerators.make_mesh(target, shared_dir / "h100.txtpb")

    return make


@pytest.mark.parametrize("target", ["h100", "v5e"])
@pytest.mark.parametrize("name", ["AdamW with pmean", "1-bit Adam, compression"])
def test_what_crosses_is_as_it_should_be(target, name, mesh_of):
    mesh, kind = mesh_of(target), for_compilers()[name]
    compiled = Run(kind, tasks.trivial(tasks.matrices(ELEMENTS)), mesh).compile()
    found = accelerators.figures(compiled, mesh, ELEMENTS, kind.phases[-1])
    assert found["unexpected"] == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["warmup", "compression"])
def test_training_step_adds_only_metrics_on_gpus(phase, mesh_of):
    assert accelerators.training_step(phase, mesh_of("h100"))["unexpected"] == []


@pytest.mark.slow
def test_bert_base_launches_few_kernels(mesh_of):
    found = accelerators.launch_figures(mesh_of("h100"))
    assert [figure["unexpected"] for figure in found.values()] == [[], [], [], []]
    assert 0 < found["AdamW with pmean"]["kernels"] <= accelerators.MOST_KERNELS


def test_launches_are_counted_in_loops_and_calls():
    assert launches((DATA / "loops_and_calls.hlo").read_text()) == Launches(
        kernels=4, copies=1, waits=1
    )


def collective(op, dtype, operand_bytes, sent):
    return Collective(op, dtype, operand_bytes, 8, "workers", "", 1, sent)


BITS = [collective("all-to-all", "u8", 800, 700), collective("all-gather", "u8", 100, 700)]
IN_WARMUP = [x._replace(bytes_sent=4.125 * x.bytes_sent) for x in BITS]
DENSE = collective("all-reduce", "f32", 25_600, 44_800)
METRICS = collective("all-reduce", "f32", 28, 49)


def test_what_should_cross_is_accepted():
    assert accelerators.unexpected("compression", False, BITS, 1400) == []
    assert accelerators.unexpected("compression", True, [*BITS, METRICS], 1400) == []
    assert accelerators.unexpected("warmup", True, [*IN_WARMUP, METRICS], 1400) == []
    assert accelerators.unexpected(None, False, [DENSE], 1400) == []


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([*BITS, METRICS], "sends f32 by all-reduce"),
        ([BITS[0], collective("all-reduce", "u32", 800, 1400)], "sends u32 by all-reduce"),
        (BITS[:1], "has no all-gather of u8"),
        ([BITS[0], collective("all-gather", "u8", 400, 2800)], "sends 3,500 bytes"),
        ([], "sends 0 bytes"),
    ],
    ids=["metrics", "widened", "one missing", "too much", "nothing"],
)
def test_what_should_not_cross_is_named(sent, problem):
    assert any(problem in x for x in accelerators.unexpected("compression", False, sent, 1400))


def test_large_all_reduces_do_not_pass_as_metrics():
    sent = [*BITS, collective("all-reduce", "f32", 4096, 7168)]
    assert "sends f32 by all-reduce" in accelerators.unexpected("compression", True, sent, 1400)


# What a program for two TPU slices sends between them.


def test_transfers_between_slices_are_read_with_the_collective_they_stand_for():
    found = between_slices((DATA / "two_slices.hlo").read_text())
    assert [(c.op, c.dtype, c.axis, c.bytes_sent) for c in found] == [
        ("all-reduce", "f32", "data", 1024),
        ("all-gather", "u8", "data", 31232),
    ]
