"""Where warm-up ends by itself, and what that costs: against shares of the run chosen by hand.

    python -m benchmarks.warmup_end --corpus TEXTS --heldout OTHER_TEXTS

1-bit Adam, whose warm-up takes 5, 15 or 30 % of the steps, or as many as `variance_stable` says,
without and with refreshes of the variance after it; and Adam. On three tasks, at two learning rates
each: a byte-level language model, BERT, and a regression whose gradients shrink late: its noise
falls to a twentieth in the sixth tenth of the run. Workers are devices that are simulated on CPUs.

A loss is the training loss, the mean of the last twentieth of the steps; beside it, what that is to
the best of the three shares. Bytes are what a worker sends in the whole run, to the shortest of the
shares that end within 0.5 % of the best. The warm-up is in float32, with
refreshes at the default's 4 bits.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from benchmarks.counts import check_counts
from train import record
from train.compare import Config, make_task
from train.config import AXIS
from train.report import read_run
from train.stop import StopRequest
from train.stream import Examples
from train.training import Task, Trainer

SHARES = 0.05, 0.15, 0.3
# So that the least share is a step, as is a twentieth, over which losses are averaged.
_FEWEST = 101
# A loss that is as good as another.
TOLERANCE = 1.005
RATES = {"lm": (2e-3, 1e-3), "bert": (2e-3, 1e-3), "late": (4e-3, 1e-3)}


@dataclasses.dataclass(frozen=True)
class WarmupEndOptions:
    """Compares a warm-up that ends by itself with others."""

    tasks: tuple[str, ...] = tuple(RATES)
    """Which tasks: lm, bert, late."""
    corpus: str | None = None
    """Folder of plain-text files; without it, the language reference that Python carries."""
    heldout: str | None = None
    """Folder of the held-out text; without it, a part of the corpus is held out."""
    steps: int = 500
    """Optimizer steps of a training."""
    workers: int = 4
    """Data-parallel workers."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/warmup_end.json")
    """File to write the figures to."""


class LateBatches:
    """Batches whose targets are noisy for half of the run, as a stream that can be resumed.

    Args:
        make: makes one, with noise of this size.
        steps: length of the run.
    """

    def __init__(self, make: Any, steps: int):
        self._make, self._steps, self._step = make, steps, 0

    def __iter__(self) -> "LateBatches":
        return self

    def __next__(self) -> Any:
        noise = 2.0 * 0.05 ** min(max(self._step / self._steps * 10 - 5, 0.0), 1.0)
        self._step += 1
        return self._make(np.random.default_rng(self._step), noise)

    def get_state(self) -> int:
        """The place."""
        return self._step

    def set_state(self, state: int) -> None:
        """Goes to a place."""
        self._step = state


def late_task(config: Config) -> Task:
    """Regression on a teacher network of two layers, whose targets are noisy for half of the run.

    Args:
        config: options of the run.
    """
    rows, inputs, hidden, outputs = 64, 32, 128, 16
    first = np.random.default_rng(0)

    def normal(*shape: int, rng: np.random.Generator = first) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    teacher = normal(inputs, 64) * 2 / math.sqrt(inputs), normal(64, outputs) / 8

    def batch(rng: np.random.Generator, noise: float) -> dict[str, np.ndarray]:
        x = normal(rows, inputs, rng=rng)
        y = np.tanh(x @ teacher[0]) @ teacher[1]
        return {"x": x, "y": y + np.float32(noise) * normal(rows, outputs, rng=rng)}

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        x = batch["x"]
        for name in ("first", "second"):
            x = jax.nn.gelu(x @ params[name] + params[f"{name}_bias"])
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2), {}

    sizes = {"first": (inputs, hidden), "second": (hidden, hidden), "last": (hidden, outputs)}
    params = {name: jnp.array(normal(*size)) / size[0] ** 0.5 for name, size in sizes.items()}
    params |= {name: jnp.zeros(hidden) for name in ("first_bias", "second_bias")}
    loss = jax.jit(lambda p, b: loss_fn(p, b)[0])
    judged_on = [batch(np.random.default_rng((0, i)), 0.0) for i in range(16)]

    class LateTask(Task):
        """A task with batches of its own."""

        def batches(self) -> Any:
            """See `LateBatches`."""
            return LateBatches(batch, config.steps)

        def heldout_batches(self) -> Any:
            """Without noise."""
            return iter(judged_on)

    nothing = Examples(lambda index, rng: {}, 0, "none")
    return LateTask(
        config,
        init=lambda: params,
        loss_fn=loss_fn,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        examples=nothing,
        heldout=nothing,
        judge=lambda params, batches: {
            "heldout_loss": float(np.mean([loss(params, b) for b in batches]))
        },
    )


def measure(options: WarmupEndOptions, mesh: Mesh, folder: str) -> list[dict[str, Any]]:
    """The figures of all trainings, which are made in a folder."""
    figures = []
    for name in options.tasks:
        common = Config(
            task="bert" if name == "bert" else "lm",
            corpus=options.corpus,
            heldout=options.heldout,
            workers=options.workers,
            batch_size=8,
            sequence_length=64,
            steps=options.steps,
            schedule_warmup=options.steps // 20,
            eval_batches=32,
            out=folder,
        )
        common.check()
        task = late_task(common) if name == "late" else make_task(common)
        of_run = [round(share * options.steps) for share in SHARES]
        kinds = [("adam", 1), *(("onebit_adam_frozen", number) for number in of_run)]
        for optimizer, warmup in [*kinds, ("onebit_adam_frozen", "auto"), ("onebit_adam", "auto")]:
            config = dataclasses.replace(common, warmup=warmup)
            trainer = Trainer(optimizer, config, task, mesh, any_rate=True)
            for rate in RATES[name]:
                one = config.one(f"{name}-{warmup}-{rate:g}", learning_rate=rate)
                result = trainer.run(one, task, StopRequest())
                run = read_run(one.folder / optimizer)
                assert run is not None
                losses = [row["loss"] for row in run.rows[-(options.steps // 20) :]]
                figures.append(
                    {
                        "task": name,
                        "learning_rate": rate,
                        "optimizer": optimizer,
                        "warmup": warmup,
                        "frozen_at": result["frozen_at"],
                        "loss": statistics.fmean(losses),
                        "heldout": result["heldout_mlm_loss" if name == "bert" else "heldout_loss"],
                        "bytes": result["bytes_sent"],
                    }
                )
                print(json.dumps(figures[-1]), flush=True)
    return figures


def table(figures: list[dict[str, Any]]) -> str:
    """A row for each task and learning rate; losses as parts of the best share's."""

    def by_kind(task: str, rate: float) -> dict[Any, dict[str, Any]]:
        own = [x for x in figures if (x["task"], x["learning_rate"]) == (task, rate)]
        return {(x["optimizer"], x["warmup"]): x for x in own}

    head = ["task", "learning rate", "Adam", *(f"{share:.0%}" for share in SHARES)]
    head += ["by itself", "at step", "bytes", "with refreshes", "bytes"]
    lines = [head, ["---"] * len(head)]
    for task, rate in dict.fromkeys((x["task"], x["learning_rate"]) for x in figures):
        of = by_kind(task, rate)
        by_hand = [x for (name, end), x in of.items() if end != "auto" and name != "adam"]
        best = min(x["loss"] for x in by_hand)
        as_good = min(x["bytes"] for x in by_hand if x["loss"] <= TOLERANCE * best)
        auto, refreshed = of["onebit_adam_frozen", "auto"], of["onebit_adam", "auto"]

        def to_best(x: dict[str, Any], best: float = best) -> str:
            return f"{x['loss']:.4f} ({x['loss'] / best - 1:+.2%})"

        line = [task, f"{rate:g}", to_best(of["adam", 1]), *map(to_best, by_hand)]
        line += [to_best(auto), str(auto["frozen_at"]), f"{auto['bytes'] / as_good:.2f}"]
        lines.append([*line, to_best(refreshed), f"{refreshed['bytes'] / as_good:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(WarmupEndOptions, prog="python -m benchmarks.warmup_end")
    check_counts(options, "workers")
    if unknown := set(options.tasks) - set(RATES):
        print(f"error: --tasks {unknown}: expected some of {', '.join(RATES)}", file=sys.stderr)
        return 2
    if options.steps < _FEWEST:
        print(f"error: --steps {options.steps}: expected {_FEWEST} or more", file=sys.stderr)
        return 2
    jax.config.update("jax_num_cpu_devices", options.workers)
    devices = jax.devices("cpu")[: options.workers]
    try:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((options.workers,), (AXIS,), axis_types=auto, devices=devices)
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options, mesh, folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record.write(options.json, options, figures, "flax")
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
