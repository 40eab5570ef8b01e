"""Faults of a training: each is made, proved to have happened, and ended as it must."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from benchmarks.soak.training import Training, WrongError

Fault = Callable[[Training, random.Random], str]
# How long the others may take to end once one has failed: with a checkpoint under way 30 s, and
# the programs' timeout.
_WITHIN = 120.0
_SLOW_SECONDS = 8.0
# What JAX says where another process failed.
_FAILED = "JAX distributed service detected fatal errors"


def kill(training: Training, rng: random.Random) -> str:
    """Kills one process: JAX ends the others."""
    victim = rng.choice(training.ranks)
    training.signal(signal.SIGKILL, victim)
    seconds = _others_end(training, victim)
    if training.codes(1, victim) != [-signal.SIGKILL]:
        raise WrongError(f"process {victim} was not killed: {training.codes(1, victim)}")
    return f"killed process {victim}, the others ended after {seconds:.1f} s"


def hang(training: Training, rng: random.Random) -> str:
    """Stops one process as a hung host does: JAX ends the others."""
    victim = rng.choice(training.ranks)
    training.signal(signal.SIGSTOP, victim)
    seconds = _others_end(training, victim)
    training.signal(signal.SIGKILL, victim)
    training.codes(_WITHIN, victim)
    return f"process {victim} hung, the others ended after {seconds:.1f} s"


def _others_end(training: Training, victim: int) -> float:
    """Waits for all others, which must say that one failed; the seconds it took."""
    begin = time.monotonic()
    others = [rank for rank in training.ranks if rank != victim]
    for rank, code in zip(others, training.codes(_WITHIN, *others), strict=True):
        said = training.said()[rank]
        if code == 0:
            raise WrongError(f"process {rank} ended with 0")
        if _FAILED not in said:
            raise WrongError(f"process {rank} does not say that one failed: {said[-2000:]}")
    return time.monotonic() - begin


def terminate(training: Training, rng: random.Random) -> str:
    """Stops all processes as a scheduler does, at any moment of a start or a run."""
    del rng
    before = training.saved()
    training.stop()
    codes = training.codes(1, *training.ranks)
    return f"exit codes {codes}, step {training.saved()} is saved, {before} was"


def fill_disk(training: Training, rng: random.Random) -> str:
    """Fills the file system of the output folder: the run ends, and says why in a line."""
    del rng
    filler = training.folder.parent / "filler"
    deadline, problem = time.monotonic() + _WITHIN, "the disk was not full"
    try:
        with filler.open("wb", buffering=0) as file:
            # Again and again, since checkpoints that are dropped make room for others.
            while training.running() and time.monotonic() < deadline:
                try:
                    file.write(bytes(2**14))
                except OSError as error:
                    problem = str(error.strerror)
                    time.sleep(0.01)
        codes = training.codes(_WITHIN, *training.ranks)
    finally:
        filler.unlink()
    said = "\n".join(training.said())
    if 0 in codes or "error: " not in said:
        raise WrongError(f"{problem}: exit codes {codes}, {said[-2000:]}")
    line = next(line for line in said.splitlines() if "error: " in line)
    return f"{problem}; exit codes {codes}, {line[:160]}"


def truncate(training: Training, rng: random.Random) -> str:
    """Cuts a file of the last checkpoint short: the next start uses the one before."""
    while len(training.checkpoints().steps()) < 2:
        training.await_progress()
    training.stop()
    step = training.saved()
    files = [
        path
        for path in (training.checkpoints().folder / str(step) / "state").rglob("*")
        if path.is_file() and path.parent.name == "d"
    ]
    path = rng.choice(files)
    os.truncate(path, rng.randrange(path.stat().st_size))
    training.start()
    training.await_progress()
    said = "\n".join(training.said())
    if f"{step} is damaged" not in said:
        raise WrongError(f"the damage to {path} went unnoticed: {said[-2000:]}")
    return f"checkpoint {step} was passed over"


def slow_link(training: Training, rng: random.Random) -> str:
    """Makes the hosts' links slow for a while: the run goes on."""
    network = training.places.network
    assert network is not None
    bandwidth = rng.choice(["1mbit", "3mbit"])
    network.shape(bandwidth)
    time.sleep(_SLOW_SECONDS)
    if not training.running() and not training.finished:
        raise WrongError(f"it did not live through {bandwidth}")
    shaped = network.shaped()
    if not shaped:
        raise WrongError("the links were not slow")
    network.shape("unshaped")
    return f"{bandwidth} for {_SLOW_SECONDS:g} s"


def cut_link(training: Training, rng: random.Random) -> str:
    """Pulls out one host's cable: JAX ends all processes."""
    network = training.places.network
    assert network is not None
    victim = rng.choice(training.ranks)
    network.plug(victim, out=True)
    begin = time.monotonic()
    try:
        codes = training.codes(_WITHIN, *training.ranks)
    finally:
        network.plug(victim)
    seconds = time.monotonic() - begin
    for rank, (code, said) in enumerate(zip(codes, training.said(), strict=True)):
        if code == 0 or _FAILED not in said:
            raise WrongError(f"process {rank}: exit code {code}, {said[-2000:]}")
    return f"host {victim} cut off, all ended after {seconds:.1f} s"


def resize(training: Training, rng: random.Random) -> str:
    """Goes on with another number of workers."""
    del rng
    training.stop()
    processes = len(training.ranks)
    before = training.workers
    training.workers = 2 * processes if before == processes else processes
    return f"{before} workers, then {training.workers}"


EVERYWHERE: dict[str, Fault] = {
    "kill -9": kill,
    "SIGTERM": terminate,
    "SIGSTOP": hang,
    "truncated checkpoint": truncate,
}
IN_NAMESPACES: dict[str, Fault] = {"slow link": slow_link, "cut link": cut_link}
ON_SMALL_DISK: dict[str, Fault] = {"full disk": fill_disk}
RESIZE = "other workers"


def small_disk(folder: pathlib.Path, megabytes: int = 48) -> str:
    """Makes a folder a file system of its own; says why not where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None or os.geteuid() != 0:
        return "mounting a small file system needs Linux and root"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    return done.stderr.strip()


def unmount(folder: pathlib.Path) -> None:
    """Takes it away again."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
