"""MaxText, unmodified, by `examples`; `ONEBIT_MAXTEXT` is a Python that has it."""

import collections
import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
_CONFIG = (
    "import importlib.util, pathlib; "
    "print(pathlib.Path(importlib.util.find_spec('maxtext').origin).parent / 'configs/base.yml')"
)
_TOY = {
    "run_name": "toy",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "enable_goodput_recording": "false",
    "skip_jax_distributed_system": "true",
    "log_config": "false",
    "base_emb_dim": 64,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "max_target_length": 64,
    "per_device_batch_size": 2,
    "attention": "dot_product",
    "steps": 40,
    "learning_rate": 0.003,
    "enable_diloco": "true",
    "ici_diloco_parallelism": 2,
    "diloco_sync_period": 1000000,
}


def python(named):
    """The Python that has a trainer."""
    if not os.environ.get(named):
        pytest.skip(f"{named} names no Python that has this trainer, which is not installed here")
    return os.environ[named]


def run(python, out, *arguments):
    """What a script of this folder prints, and its report."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "JAX_PLATFORMS": "cpu",
        "DECOUPLE_GCLOUD": "TRUE",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    script, *options = arguments
    command = [python, str(ROOT / "tests/sharded" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=out)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    [report] = re.findall(r"^REPORT (.*)$", output, re.MULTILINE)
    return output, json.loads(report)


def maxtext(out, launcher, *options):
    own = python("ONEBIT_MAXTEXT")
    config = subprocess.run([own, "-c", _CONFIG], capture_output=True, text=True, check=True)
    toy = [f"{name}={value}" for name, value in _TOY.items()]
    arguments = [launcher, config.stdout.strip(), *toy, f"base_output_directory={out}", *options]
    output, report = run(own, out, "maxtext_run.py", *arguments)
    losses = re.findall(r"completed step: \d+, .*?, loss: ([\d.]+)", output)
    return [float(x) for x in losses], report


def added(one_bit, alone):
    """What a step sends more than that of replicas which exchange nothing."""
    sent = [collections.Counter(map(tuple, x["sent"])) for x in (one_bit, alone)]
    return sent[0] - sent[1]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_bits_alone_cross_between_replicas(tmp_path, axis):
    split = f"ici_{axis}_parallelism=2"
    losses, report = maxtext(tmp_path, str(ROOT / "examples/maxtext_onebit.py"), split)
    _, alone = maxtext(tmp_path, "none", split, "gradient_clipping_threshold=0")
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.3
    assert report["replicas_differ_by"] == 0
    assert alone["replicas_differ_by"] > 1e-3
    # The workers' mean squared norm; along the fast axis those of 12 tensors' gradients and
    # variances. XLA sends them together with others, and so in other collectives.
    more = collections.Counter()
    for sign, found in ((1, report), (-1, alone)):
        for _, dtype, place, size in found["sent"]:
            more[dtype, place] += sign * size
    assert more.pop(("u8", "diloco")) > 0
    assert {place: size for place, size in more.items() if size} == {
        ("f32", "diloco"): 4,
        ("f32", axis): 2 * 48,
    }
    # Beside m and v a device holds bits: one of each that it sends, and of each active element.
    assert report["state_bytes"] < 1.1 * alone["state_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["onebit_muon", "local_steps"])
def test_a_value_of_the_configuration_selects_the_optimizer(tmp_path, optimizer):
    options = ("ici_fsdp_parallelism=2", "scan_layers=false", "gradient_clipping_threshold=0")
    launcher = str(ROOT / "examples/maxtext_onebit.py")
    losses, report = maxtext(tmp_path, launcher, *options, f"optimizer={optimizer}")
    _, alone = maxtext(tmp_path, "none", *options)
    assert losses[-1] < losses[0] - 0.3
    more = added(report, alone)
    assert {dtype for _, dtype, place, _ in more if place == "diloco"} == {"u8"}
    fast = {(op, dtype) for op, dtype, place, _ in more if place != "diloco"}
    # Muon gathers the kernels that it orthogonalizes.
    assert fast == ({("all-gather", "f32")} if optimizer == "onebit_muon" else set())
    # The fortieth step is the last of ten: what replicas share is added to their own, rounded.
    rounding = 0 if optimizer == "onebit_muon" else 1e-6
    assert report["replicas_differ_by"] <= rounding
