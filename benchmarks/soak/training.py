"""A training of several processes: started, stopped, and held to one that nothing disturbed."""

import contextlib
import json
import math
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.cluster import Places, end
from benchmarks.soak.worker import badness
from onebit_jax.checkpoint import Checkpoints

NAME = "onebit_adam"
EVERY = 50
# Of losses after a change of the number of workers, which is followed by other roundings.
_TOLERANCE = 0.02
_WINDOW = 200
# What a heavily loaded machine may take to start, compile and reach the next checkpoint.
_PATIENCE = 900.0


class WrongError(Exception):
    """The training did what it must not do."""


class Training:
    """The processes of a run in a folder.

    Args:
        folder: of the run.
        logs: the folder for what processes print.
        places: where they run.
        seed: of the run and its bad batches.
        steps: how many it has.
        timeout: the programs' ``--process-timeout``.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        logs: pathlib.Path,
        places: Places,
        *,
        seed: int,
        steps: int,
        timeout: int,
    ):
        self.folder, self.places, self.seed, self.timeout = folder, places, seed, timeout
        self.workers = len(places.commands)
        self._logs, self._steps, self._starts = logs, steps, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Starts all processes."""
        self._starts += 1
        steps = self._steps
        options = (
            f"--optimizers {NAME} --workers {self.workers} --batch-size 16 --sequence-length 32 "
            f"--steps {steps} --warmup {steps // 10} --schedule-warmup {steps // 20} "
            f"--learning-rate 4e-3 --checkpoint-every {EVERY} --diagnose-every {EVERY} "
            f"--eval-batches 8 --process-timeout {self.timeout} --seeds {self.seed}"
        )
        program = ["benchmarks.soak.worker", *options.split(), "--out", str(self.folder)]
        with contextlib.ExitStack() as opened:
            logs = [opened.enter_context(path.open("wb")) for path in self._paths()]
            # A port of its own, since the one before may linger.
            port = 23456 + self._starts % 1000
            self._processes = self.places.start(program, port, logs)

    def _paths(self) -> list[pathlib.Path]:
        ranks = range(len(self.places.commands))
        return [self._logs / f"start-{self._starts}-process-{rank}.txt" for rank in ranks]

    def said(self) -> list[str]:
        """What each process has printed since it started, without its progress bar."""
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in self._paths()]
        return ["\n".join(_lines(text)) for text in texts]

    def end(self) -> None:
        """Leaves no process running."""
        end(self._processes)

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to these processes."""
        for rank in ranks:
            self._processes[rank].send_signal(number)

    def running(self) -> bool:
        """Whether all processes run."""
        return all(process.poll() is None for process in self._processes)

    def codes(self, seconds: float, *ranks: int) -> list[int]:
        """The exit codes of these processes, which must have ended within so many seconds."""
        deadline = time.monotonic() + seconds
        for rank in ranks:
            try:
                self._processes[rank].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise WrongError(f"process {rank} still runs after {seconds:g} s") from None
        return [self._processes[rank].returncode for rank in ranks]

    def stop(self) -> None:
        """Stops all processes as a scheduler does; they save the run first."""
        self.signal(signal.SIGTERM, *self.ranks)
        codes = self.codes(self.timeout + 30.0, *self.ranks)
        # Before there is anything to save the signal has its usual effect, and JAX ends the others.
        if not set(codes) <= {143, -signal.SIGTERM, 0, -signal.SIGABRT}:
            raise WrongError(f"SIGTERM: exit codes {codes}")

    @property
    def ranks(self) -> range:
        """The processes."""
        return range(len(self.places.commands))

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / NAME / "result.json").exists()

    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints(self.folder / NAME / "checkpoints")

    def saved(self) -> int:
        """The step of the last checkpoint, 0 before the first."""
        return max(self.checkpoints().steps(), default=0)

    def await_progress(self) -> None:
        """Waits for a checkpoint more than there is, or the end of the run."""
        before, deadline = self.saved(), time.monotonic() + _PATIENCE
        while self.saved() <= before and not self.finished:
            if not self.running() and not self.finished:
                raise WrongError(f"a process ended by itself: {self.said()}")
            if time.monotonic() > deadline:
                raise WrongError(f"no checkpoint after {before} in {_PATIENCE:g} s")
            time.sleep(0.2)

    def rows(self) -> list[dict[str, Any]]:
        """The log of steps, as far as it is on disk."""
        path = self.folder / NAME / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last one may be half-written
                found.append(json.loads(line))
        return found

    def bad_steps(self, upto: int) -> list[int]:
        """The steps that were given a bad batch, from 1."""
        return [step + 1 for step in range(upto) if badness(self.seed, step)]

    def check(self, undisturbed: "Training", *, resized_at: int | None) -> int:
        """Holds what was logged to the log of a run that nothing disturbed.

        Args:
            undisturbed: that run.
            resized_at: the step after which the number of workers was another, if it ever was.

        Returns:
            The number of steps that were compared.

        Raises:
            WrongError: a loss differs, a step is missing, or a bad batch was not left out.
        """
        rows, expected = self.rows(), undisturbed.rows()
        for number, (row, other) in enumerate(zip(rows, expected, strict=False), 1):
            if row["step"] != number:
                raise WrongError(f"row {number} of the log is of step {row['step']}")
            alike = resized_at is None or number <= resized_at
            if alike and _essence(row) != _essence(other):
                raise WrongError(f"step {number}: {_essence(row)}, undisturbed {_essence(other)}")
        left_out = [row["step"] for row in rows if row["skipped_in_a_row"]]
        if left_out != self.bad_steps(len(rows)):
            raise WrongError(f"left out {left_out}, bad were {self.bad_steps(len(rows))}")
        if resized_at is not None and len(rows) > resized_at + _WINDOW:
            ours, theirs = (_mean_loss(of, len(rows)) for of in (rows, expected))
            if abs(ours / theirs - 1) > _TOLERANCE:
                raise WrongError(f"mean loss up to step {len(rows)}: {ours}, {theirs} undisturbed")
        return len(rows)

    def result(self) -> dict[str, Any]:
        """Of the finished run."""
        return json.loads((self.folder / NAME / "result.json").read_bytes())


def _essence(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("loss", "phase", "bytes_sent", "lr")}


def _mean_loss(rows: list[dict[str, Any]], upto: int) -> float:
    # Of a bad batch the loss is multiplied by what makes it bad.
    losses = [row["loss"] for row in rows[upto - _WINDOW : upto] if not row["skipped_in_a_row"]]
    mean = float(np.mean(losses))
    if not math.isfinite(mean):
        raise WrongError(f"mean loss up to step {upto}: {mean}")
    return mean


def _lines(text: str) -> Iterator[str]:
    """Lines that are not the progress bar's."""
    for line in text.splitlines():
        last = line.rpartition("\r")[2].strip()
        if last and "steps/s" not in last and "/ steps" not in last:
            yield last
