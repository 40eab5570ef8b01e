"""The steps of the Containerfile, as far as they can be tried without a container."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text())
RUNS = re.findall(r"^RUN (.*)", TEXT, re.MULTILINE)


def test_what_it_copies_is_there():
    copied = [
        x for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for x in line.split()
    ]
    assert {"pyproject.toml", "onebit_jax", "train", "examples"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (0, "error: no Python 3.11 or later in the base image: give --build-arg BASE=..."),
        (1, "error: https://mirror/simple lacks a package, or is not reached: give --build-arg"),
    ],
)
def test_a_step_that_fails_says_what_is_missing(step, reason, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "PIP_INDEX_URL": "https://mirror/simple", "JAX": "jax"}
    shell = ["/bin/sh", "-c", RUNS[step]]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(reason)


def test_its_last_step_takes_the_options_that_the_program_has():
    command = RUNS[-1].split()
    assert command[:2] == ["python", "examples/hosts.py"]
    program = (ROOT / command[1]).read_text()
    assert all(f'"{x}"' in program for x in command if x.startswith("--"))
