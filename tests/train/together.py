"""Starts commands together, as the processes of one run."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 600  # a loaded machine starts interpreters slowly


def free_address() -> str:
    """An address of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def started(
    modules: Sequence[Sequence[str]], folders: Sequence[pathlib.Path] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts `python -m` with each of the arguments, in these folders; in the end none is left."""
    pipe = subprocess.PIPE
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for arguments, folder in zip(modules, folders or [ROOT] * len(modules), strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: Sequence[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Waits for processes; their exit codes, and what they wrote to standard error."""
    errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    return [process.returncode for process in processes], errors


def run(
    program: str, options: Sequence[Sequence[str]], folders: Sequence[pathlib.Path] | None = None
) -> tuple[list[int], list[str]]:
    """Runs a program in as many processes as there are options, in these folders."""
    address, count = free_address(), len(options)
    place = ["--coordinator", address, "--processes", str(count), "--process-id"]
    commands = [[program, *own, *place, str(index)] for index, own in enumerate(options)]
    with started(commands, folders) as processes:
        return ended(processes)
