"""What a run reports while it trains: bar, `metrics.jsonl` and `diagnosis.jsonl`."""

import functools
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jax
import numpy as np
from tqdm import tqdm

from onebit_jax.transforms.algorithm import PHASES, Phase
from onebit_jax.watching.diagnosis import Diagnosis
from train.checkpoint import Progress
from train.config import RunConfig
from train.registry import REGISTRY

# A whole line of a file of JSON lines.
_STEP = re.compile(r'\{"step": (\d+),.*\}\n')


class StepBar(tqdm):
    """A bar of steps on standard error.

    Args:
        name: what is trained.
        steps: how many there are.
        done: how many were made before.
        **options: of `tqdm`.
    """

    def __init__(self, name: str, steps: int, done: int = 0, **options: Any):
        super().__init__(
            desc=name, total=steps, initial=done, unit=" steps", dynamic_ncols=True, **options
        )

    def compiling(self) -> None:
        """Says so at once: the step of a large model compiles for a minute, in each phase."""
        self.set_postfix_str("compiling a step")


def announced(loss_fn: Callable[..., Any], announce: Callable[[], object]) -> Callable[..., Any]:
    """The same loss, which announces that it is traced: a step of it is compiled then."""

    @functools.wraps(loss_fn)
    def loss(*args: Any, **named: Any) -> Any:
        announce()
        return loss_fn(*args, **named)

    return loss


class MetricsLog:
    """The log of one optimizer's training; a context manager. Process 0 alone writes, and shows.

    What an earlier start logged past the checkpoint that the run goes on from is taken back.

    Args:
        name: the optimizer.
        config: the run.
        progress: where the run goes on from.
        bytes_sent: what a worker sends in a step of a phase.
        dense: what it would send in a step at full precision.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        progress: Progress,
        bytes_sent: Callable[[Phase], int],
        dense: float,
    ):
        self.progress = progress
        self._name = name
        self._config = config
        self._bytes_sent, self._dense = bytes_sent, dense
        # Of all steps at once: computed in each, they would wait for the step that is running.
        self._learning_rates = np.asarray(config.learning_rate_schedule()(np.arange(config.steps)))
        self._begin = time.perf_counter() - progress.seconds
        self._in_flight: tuple[int, dict[str, jax.Array]] | None = None
        self._writes = jax.process_index() == 0
        self._files: list[Any] = []
        if self._writes:
            folder = config.folder / name
            self._lines = _open_truncated(folder / "metrics.jsonl", progress.step)
            self._diagnoses = _open_truncated(folder / "diagnosis.jsonl", progress.step)
            self._files = [self._lines, self._diagnoses]
        self.bar = StepBar(name, config.steps, progress.step, disable=not self._writes)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        for output in (self.bar, *self._files):
            output.close()

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
        phase = PHASES[index] if index >= 0 else REGISTRY[self._name].first_phase
        sent, phases = self._bytes_sent(phase), self.progress.phases
        self.progress = Progress(
            step=step + 1,
            bytes_sent=self.progress.bytes_sent + sent,
            seconds=time.perf_counter() - self._begin,
            frozen_at=values.pop("frozen_at", -1),
            phases={**phases, phase: phases.get(phase, 0) + 1},
        )
        if self._writes:
            rate, saved = self._learning_rates[step].item(), self._saved()
            shown = (
                f"loss {values['loss']:.3f}, {'dense' if sent >= self._dense else phase}, "
                f"lr {rate:.2g}, {saved / 1e6:,.0f} MB saved"
            )
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()
            if self.progress.step % self._config.log_every == 0:
                self._write(values | {"phase": phase, "lr": rate, "bytes_saved": saved})
        return self.progress

    def _saved(self) -> int:
        """Bytes that a worker has sent less than it would at full precision.

        A dense step sends a few more than gradients have, for the loss.
        """
        return max(round(self._dense * self.progress.step) - self.progress.bytes_sent, 0)

    def diagnosed(self, diagnosis: Diagnosis) -> None:
        """Logs what was found after the last step that landed, and says what is wrong."""
        if not self._writes:
            return
        step, figures = self.progress.step, _without_nan(diagnosis.figures)
        for warning in diagnosis.warnings:
            self.bar.write(f"warning: step {step}, {warning}", file=sys.stderr)
        row = {
            "step": step,
            "figures": figures,
            "warnings": diagnosis.warnings,
            "tensors_compared": len(diagnosis.compared),
        }
        self._diagnoses.write(json.dumps(row) + "\n")

    def flush(self) -> None:
        """Brings all that was logged to disk."""
        for output in self._files:
            output.flush()

    def _write(self, values: dict[str, Any]) -> None:
        step = self.progress.step
        made = {
            "samples": step * self._config.batch_size,
            "bytes_sent": self.progress.bytes_sent,
            "seconds": round(self.progress.seconds, 4),
        }
        self._lines.write(json.dumps(_without_nan({"step": step, **values, **made})) + "\n")


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same with None for what is not finite, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def _open_truncated(path: pathlib.Path, step: int) -> TextIO:
    """Opens a file of JSON lines, of which each begins with its step, to append after `step`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if path.exists():
        # Only whole lines: a process that was killed may have left half a one.
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        found = [(_STEP.match(line), line) for line in lines]
        kept = [line for match, line in found if match and int(match[1]) <= step]
    path.write_text("".join(kept), encoding="utf-8")
    return path.open("a", buffering=1, encoding="utf-8")  # a line at a time
