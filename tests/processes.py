"""Runs a worker module in several processes of this machine."""

import pathlib
import sys

import jax
import numpy as np

from tests.train.together import ended, free_address, started


def run_processes(folder, processes, worker="tests.process_worker"):
    """Runs the processes to their end; what their devices held, by name.

    Each is `python -m WORKER FOLDER PROCESSES RANK PORT`, and leaves `FOLDER/PROCESSES-RANK.npz`.
    """
    port = free_address().split(":")[1]
    arguments = [[str(folder), str(processes), str(rank), port] for rank in range(processes)]
    with started([[worker, *own] for own in arguments]) as children:
        codes, errors = ended(children)
    assert codes == [0] * processes, "\n---\n".join(error[-4000:] for error in errors)
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
