"""What a run reports while it trains: bar, `metrics.jsonl`, `diagnosis.jsonl`, TensorBoard."""

import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jax
import numpy as np

import onebit_jax
from onebit_jax.transforms.phases import PHASES, Phase
from train.checkpoint import Progress
from train.config import RunConfig
from train.events import Events
from train.optimizers import OPTIMIZERS
from train.progress import StepBar


class MetricsLog:
    """The log of one optimizer's training; a context manager. Process 0 alone writes.

    What an earlier start logged past the checkpoint that the run goes on from is taken back.

    Args:
        name: the optimizer.
        config: the run.
        progress: where the run goes on from.
        bytes_sent: what a worker sends in a step of a phase.
    """

    def __init__(
        self, name: str, config: RunConfig, progress: Progress, bytes_sent: Callable[[Phase], int]
    ):
        self.progress = progress
        self._name = name
        self._config = config
        self._bytes_sent = bytes_sent
        # Of all steps at once: computed in each, they would wait for the step that is running.
        self._learning_rates = np.asarray(config.learning_rate_schedule()(np.arange(config.steps)))
        self._begin = time.perf_counter() - progress.seconds
        self._in_flight: tuple[int, dict[str, jax.Array]] | None = None
        self._writes = jax.process_index() == 0
        if self._writes:
            folder = config.folder / name
            self._lines, last = _open_truncated(folder / "metrics.jsonl", progress.step)
            if progress.step - last >= config.log_every:
                print(
                    f"warning: {folder / 'metrics.jsonl'} has nothing of steps {last + 1} to "
                    f"{progress.step}; the run goes on without them",
                    file=sys.stderr,
                )
            self._diagnoses, _ = _open_truncated(folder / "diagnosis.jsonl", progress.step)
            self._events = Events(folder, progress.step + 1)
        self._bar = StepBar(name, config.steps, progress.step, disable=not self._writes)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._writes:
            self._lines.close()
            self._diagnoses.close()
            self._events.close()

    def compiling(self, phase: Phase | None) -> None:
        """Says what the next step waits for; None for a step without phases, or with them all."""
        self._bar.compiling(phase)

    def dispatched(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of step `step`, which may still be running, and lands the one before.

        Staying one step behind, the host never makes the device wait.
        """
        self.land()
        self._in_flight = step, metrics

    def land(self) -> Progress:
        """Waits for the last step's metrics, logs them, and returns the progress made."""
        if self._in_flight is None:
            return self.progress
        step, metrics = self._in_flight
        self._in_flight = None
        values = {key: value.item() for key, value in jax.device_get(metrics).items()}
        # Parts of an optimizer that report one each have their names in front.
        reported = [key for key in values if key.rpartition("/")[2] == "phase"]
        index = max(values.pop(key) for key in reported)
        # Where the very first step was skipped no update has a phase yet.
        phase = PHASES[index] if index >= 0 else OPTIMIZERS[self._name].first_phase
        sent, phases = self._bytes_sent(phase), self.progress.phases
        self.progress = Progress(
            step=step + 1,
            bytes_sent=self.progress.bytes_sent + sent,
            seconds=time.perf_counter() - self._begin,
            frozen_at=values.pop("frozen_at", -1),
            phases={**phases, phase: phases.get(phase, 0) + 1},
        )
        if self._writes:
            self._show(phase, values["loss"], sent)
            if self.progress.step % self._config.log_every == 0:
                self._write(values | {"phase": phase, "lr": self._learning_rates[step].item()})
        return self.progress

    def diagnosed(self, diagnosis: onebit_jax.Diagnosis) -> None:
        """Logs what was found after the last step that landed, and says what is wrong."""
        if not self._writes:
            return
        step, figures = self.progress.step, _without_nan(diagnosis.figures)
        for warning in diagnosis.warnings:
            self._bar.write(f"warning: step {step}, {warning}", file=sys.stderr)
        row = {
            "step": step,
            "figures": figures,
            "warnings": diagnosis.warnings,
            "tensors_compared": len(diagnosis.compared),
        }
        self._diagnoses.write(json.dumps(row) + "\n")
        for name, value in figures.items():
            if value is not None:
                self._events.add_scalar(f"diagnosis/{name}", value, step)

    def flush(self) -> None:
        """Brings all that was logged to disk."""
        if self._writes:
            self._lines.flush()
            self._diagnoses.flush()
            self._events.flush()

    def _show(self, phase: Phase, loss: float, sent: int) -> None:
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {phase}, {sent / 1e6:.3g} MB sent a step", refresh=False
        )
        self._bar.update()

    def _write(self, values: dict[str, Any]) -> None:
        step = self.progress.step
        row = {
            "step": step,
            **values,
            "samples": step * self._config.batch_size,
            "bytes_sent": self.progress.bytes_sent,
            "seconds": round(self.progress.seconds, 4),
        }
        row = _without_nan(row)
        self._lines.write(json.dumps(row) + "\n")
        for key, value in row.items():
            if key not in ("step", "phase") and value is not None:
                self._events.add_scalar(key, value, step)


def _step_of(line: str) -> int | None:
    """The step of a line; None of one that is damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same with None for what is not finite, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _open_truncated(path: pathlib.Path, step: int) -> tuple[TextIO, int]:
    """Opens a file of JSON lines to append to, without those past `step`; with the last one's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept, last = [], 0
    if path.exists():
        # Only whole lines: a process that was killed may have left half a one.
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        steps = [_step_of(line) for line in whole]
        if torn := steps.count(None):
            print(f"warning: {torn} lines of {path} are damaged and left out", file=sys.stderr)
        kept = [
            line for line, own in zip(whole, steps, strict=True) if own is not None and own <= step
        ]
        last = max((own for own in steps if own is not None and own <= step), default=0)
    path.write_text("".join(kept), encoding="utf-8")
    return path.open("a", buffering=1, encoding="utf-8"), last  # a line at a time
