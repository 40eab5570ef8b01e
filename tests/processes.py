"""Runs a worker module in several processes of this machine."""

import pathlib
import subprocess
import sys
import time

import jax
import numpy as np

from tests.train.together import free_address

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 600  # a loaded machine starts four interpreters slowly


def run_processes(folder, processes, worker="tests.process_worker"):
    """Runs the processes to their end; what their devices held, by name.

    Each is `python -m WORKER FOLDER PROCESSES RANK PORT`, and leaves `FOLDER/PROCESSES-RANK.npz`.
    """
    port = free_address().split(":")[1]
    logs = [folder / f"{processes}-{rank}.log" for rank in range(processes)]
    children = []
    try:
        for rank, log in enumerate(logs):
            arguments = [str(folder), str(processes), str(rank), port]
            command = [sys.executable, "-m", worker, *arguments]
            with log.open("w") as file:
                children.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file))
        deadline = time.monotonic() + SECONDS
        # Those that are left wait for one that has failed, so nobody waits for them.
        while None in (codes := [child.poll() for child in children]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.wait()
    output = "\n".join(f"--- {log.stem}:\n{log.read_text()[-4000:]}" for log in logs)
    assert codes == [0] * processes, f"exit codes {codes} (None: still running)\n{output}"

    held = {}
    for rank in range(processes):
        with np.load(folder / f"{processes}-{rank}.npz") as file:
            held.update(file)
    return held


def join_processes(work, workers):
    """What a worker module does in each of its processes, with its share of the workers.

    Args:
      work: of the folder, the number of processes, and its rank among them, makes the arrays that
        `run_processes` returns, by name.
      workers: of all processes, a device each.
    """
    folder, (processes, rank, port) = pathlib.Path(sys.argv[1]), map(int, sys.argv[2:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", workers // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    np.savez(folder / f"{processes}-{rank}.npz", **work(folder, processes, rank))


def on_mesh(value, sharding):
    """An array of which every process places its own part."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
