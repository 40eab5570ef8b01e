"""The language model's program where the model is split over the fast axes of a mesh."""

import json
import signal

import numpy as np
import pytest

from tests.train.runs import assert_refused, at_step, metrics, result, saved, sigterm, smaller
from train.lm import model, pretrain

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_model")

STEPS = 12
MESH = ["--mesh", "data=2,fsdp=2,tensor=2"]
RUN = (
    "--batch-size 16 --sequence-length 32 --learning-rate 1e-2 --eval-batches 2 "
    f"--steps {STEPS} --warmup 6 --schedule-warmup 2 --checkpoint-every 5"
).split()
NAMES = ("adam", "onebit_adam_frozen")
# Of matrices that are not padded much when each of four devices has a quarter.
small_model = smaller(model.SIZES, "nano", (1, 64, 4, 128))


def train(out, *options):
    assert pretrain.main([*RUN, *options, "--out", str(out)]) == 0
    return out


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--mesh data=2,fsdp=2 --workers 4", "--workers 4: --mesh data=2,fsdp=2 has 2 workers"),
        ("--mesh fsdp=2", "--mesh fsdp=2: expected data=N, and beside it fsdp=N, tensor=N or both"),
        ("--mesh data=2,model=2", "expected data=N"),
        ("--mesh data=0,fsdp=2", "expected data=N"),
        ("--mesh data=4,fsdp=4", "data = 4, fsdp = 4: a device each, but 1 processes have 8 (cpu)"),
        ("--mesh data=2,fsdp=4 --batch-size 12", "--batch-size 12: expected a multiple of 8"),
        ("--mesh data=1,tensor=3", "axis 1 is partitioned 3 times, but the dimension size is 64"),
        ("--scale-per tensor", "--scale-per tensor: expected shard, since no --mesh splits"),
        ("--mesh data=2,fsdp=2 --scale-per tensor --optimizers adam", "expected nothing, since"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(options, complaint, tmp_path, capsys):
    assert_refused(pretrain.main, [*RUN, *options.split()], complaint, tmp_path / "out", capsys)


@pytest.fixture(scope="module")
def split(tmp_path_factory, quick_compilation, small_model):
    out = tmp_path_factory.mktemp("split") / "run"
    return train(out, *MESH, "--scale-per", "tensor", "--optimizers", *NAMES)


@pytest.mark.slow
def test_losses_are_those_of_data_parallel_training(split, tmp_path):
    whole = train(tmp_path / "run", "--workers", "2", "--optimizers", *NAMES)
    # After six steps some elements have next to no variance, and so take long steps, whose signs
    # are as rounding has it: from the first compressed update on losses agree less.
    for name, dense, tolerance in zip(NAMES, (STEPS, 7), (1e-3, 5e-2), strict=True):
        found, expected = losses(split / name), losses(whole / name)
        np.testing.assert_allclose(found[:dense], expected[:dense], atol=1e-3)
        np.testing.assert_allclose(found, expected, atol=tolerance)
        found, expected = result(split / name), result(whole / name)
        assert found["heldout_loss"] == pytest.approx(expected["heldout_loss"], abs=tolerance)
        assert found["heldout_tokens"] == expected["heldout_tokens"]
        # Norms' scales are whole on all devices.
        assert found["state_bytes"] == pytest.approx(expected["state_bytes"] / 4, rel=0.03)
        assert (found["devices"], expected["devices"]) == (8, 2)


@pytest.mark.slow
def test_bits_alone_cross_the_slow_axis_and_the_report_compares_with_dense(split):
    adam, onebit = (result(split / name) for name in NAMES)
    dense, compressed = adam["bytes_a_step"]["warmup"], onebit["bytes_a_step"]["compression"]
    assert dense == pytest.approx(4 * adam["parameters"] / 4, rel=0.02)
    assert compressed < dense / 20
    report = (split / "report.md").read_text()
    assert report.startswith("# Language model nano, 2 workers of 4 devices, ")
    compared = [
        json.loads(line)["tensors_compared"]
        for line in (split / "adam" / "diagnosis.jsonl").read_text().splitlines()
    ]
    assert len(compared) == 3
    assert all(count > 10 for count in compared)


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_bit_identical(split, tmp_path, capsys):
    out = tmp_path / "run"
    options = [*RUN, *MESH, "--scale-per", "tensor", "--optimizers", NAMES[1]]
    with at_step(4, sigterm):
        assert pretrain.main([*options, "--out", str(out)]) == 128 + signal.SIGTERM
    assert "stopped after step 4" in capsys.readouterr().err
    train(out, *options)
    whole, again = (folder / NAMES[1] for folder in (split, out))
    assert metrics(again) == metrics(whole)
    assert saved(again) == saved(whole)


@pytest.mark.slow
def test_it_goes_on_with_another_number_of_workers_split_as_it_was(tmp_path, capsys):
    out, options = tmp_path / "run", [*RUN, "--optimizers", NAMES[1], "--out"]
    with at_step(8, sigterm):
        assert pretrain.main([*options, str(out), "--mesh", "data=2,fsdp=2"]) == 143
    before = metrics(out / NAMES[1])
    assert pretrain.main([*options, str(out), "--mesh", "data=2,fsdp=4"]) == 2
    assert "split over {'fsdp': 4}: the fast axes must be the same" in capsys.readouterr().err
    assert pretrain.main([*options, str(out), "--mesh", "data=4,fsdp=2"]) == 0
    after = metrics(out / NAMES[1])
    assert after[:8] == before
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    assert after[-1]["loss"] < after[0]["loss"] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["onebit_adam", "onebit_lamb", "onebit_muon", "zero_one_adam", "local_steps_4"]
)
def test_other_optimizers_run_on_it(name, tmp_path):
    options = ["--optimizers", name, "--learning-rate", "1e-3", "--warmup", "4"]
    out = train(tmp_path / "run", *MESH, *options) / name
    assert losses(out)[-1] < losses(out)[0]
    sent = result(out)["bytes_a_step"]
    assert all(count > 0 for phase, count in sent.items() if phase != "local")
