"""How soon the other of two processes ends, and with what words, where one does otherwise.

    python -m benchmarks.own_loops
    python -m benchmarks.own_loops --stall-timeout 60 --cases save collective

Two processes train in a loop of their own, inside `onebit_jax.process_group`; after four steps
process 1 does what process 0 does not.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import onebit_jax
from onebit_jax.checkpoint import Checkpoints

# What process 1 does after four steps.
CASES = {
    "raise": "its loader raises",
    "interrupt": "is interrupted (Ctrl-C)",
    "early": "ends its loop earlier",
    "save": "saves a checkpoint alone",
    "collective": "makes one more collective",
    "loader": "waits in its loader",
    "kill": "is killed (SIGKILL)",
    "suspend": "is suspended (SIGSTOP)",
}
_STEPS = 4
_FOREVER = 10**6
_MARK = "does otherwise at "


class Ending(NamedTuple):
    """How two processes ended.

    Attributes:
        codes: their exit codes.
        errors: what each wrote to standard error.
        seconds: from what process 1 did until process 0 had ended.
    """

    codes: list[int]
    errors: list[str]
    seconds: float


def _batches(rank: int, case: str) -> Iterator[np.ndarray]:
    """What one process is given."""
    for i in range(_FOREVER):
        if rank == 1 and i == _STEPS:
            print(f"{_MARK}{time.time()}", flush=True)
            match case:
                case "raise":
                    raise RuntimeError("no such shard")
                case "interrupt":
                    # Started in a shell's background, a process ignores it.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.kill(os.getpid(), signal.SIGINT)
                case "early":
                    return
                case "loader":
                    time.sleep(_FOREVER)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "suspend":
                    os.kill(os.getpid(), signal.SIGSTOP)
        yield np.full((2, 4), i, np.float32)


def train(rank: int, case: str, group: onebit_jax.ProcessGroup, folder: str) -> None:
    """What each of the two processes does."""
    mesh = jax.make_mesh((2,), ("data",))
    tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
    step = onebit_jax.train_step(lambda w, x: jnp.mean((w - x) ** 2), tx, mesh)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    params = np.zeros(4, np.float32)
    state = onebit_jax.init(tx, params, mesh)
    with Checkpoints(folder) as checkpoints:
        for i, own in enumerate(_batches(rank, case)):
            batch = jax.make_array_from_process_local_data(rows, own)
            params, state, metrics = step(params, state, batch)
            float(metrics["loss"])
            if rank == 1 and i == _STEPS and case == "save":
                checkpoints.save(i + 1, params, state)
            if rank == 1 and i == _STEPS and case == "collective":
                multihost_utils.sync_global_devices("evaluated")
            group.progress()


def _process(
    address: str, rank: int, case: str, stall_timeout: float, starts_jax: bool, folder: str
) -> None:
    """One of the two processes."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    if starts_jax:
        jax.distributed.initialize(address, 2, rank)
        joined = onebit_jax.process_group(stall_timeout=stall_timeout)
    else:
        joined = onebit_jax.process_group(address, 2, rank, stall_timeout=stall_timeout)
    with joined as group:
        train(rank, case, group, folder)


def run(case: str, stall_timeout: float, *, starts_jax: bool = False) -> Ending:
    """Runs two processes to their end.

    Args:
        case: what process 1 does.
        stall_timeout: as of `onebit_jax.process_group`.
        starts_jax: whether they call `jax.distributed.initialize` themselves, before.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipe, address, processes = subprocess.PIPE, _free_address(), []
        for rank in range(2):
            options = [address, str(rank), case, str(stall_timeout), str(starts_jax), folder]
            command = [sys.executable, "-m", "benchmarks.own_loops", "--process", *options]
            processes.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        try:
            _, error = processes[0].communicate()
            ended = time.time()
            if case == "suspend":
                processes[1].kill()
            said, other = processes[1].communicate()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    [begun] = [line for line in said.splitlines() if line.startswith(_MARK)]
    seconds = ended - float(begun.removeprefix(_MARK))
    return Ending([process.returncode for process in processes], [error, other], seconds)


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints, for each case, the seconds and what process 0 said."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.own_loops", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--stall-timeout", type=float, default=20.0, help="as of process_group")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--process", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.process:
        address, rank, case, stall_timeout, starts_jax, folder = options.process
        _process(address, int(rank), case, float(stall_timeout), starts_jax == "True", folder)
        return 0
    for case in options.cases:
        codes, errors, seconds = run(case, options.stall_timeout)
        lines = [line for line in errors[0].splitlines() if line.startswith("error: ")]
        print(f"{CASES[case]}: {seconds:.1f} s, exit codes {codes}", *lines, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
