"""Levanter's trainer, by the example; `ONEBIT_LEVANTER` is a Python that has Levanter."""

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python():
    named = os.environ.get("ONEBIT_LEVANTER")
    if not named:
        pytest.skip("Levanter is not installed here: ONEBIT_LEVANTER names no Python that has it")
    return named


def run(python, out, name, learning_rate=0.01):
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [python, str(ROOT / "tests/sharded/levanter_run.py"), name, str(learning_rate)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    [report] = re.findall(r"^REPORT (.*)$", done.stdout, re.MULTILINE)
    return json.loads(report)


@pytest.mark.slow
def test_bits_alone_cross_between_replicas(python, tmp_path):
    one_bit, dense = (run(python, tmp_path, name) for name in ("onebit_adam", "adam"))
    assert one_bit["losses"][0] == pytest.approx(dense["losses"][0], rel=1e-4)
    assert one_bit["losses"][-1] < 0.6 * one_bit["losses"][0]
    assert one_bit["replicas_equal"]
    between = [x for x in one_bit["sent"] if "replica" in x[2]]
    # The loss besides.
    assert {dtype for _, dtype, _, size in between if size > 8} == {"u8"}
    assert {dtype for _, dtype, axis, size in dense["sent"] if "replica" in axis} == {"f32"}
    # Two replicas of two devices: each has a quarter of the rows.
    assert one_bit["state"]
    assert set(one_bit["state"]) == {0.25}
