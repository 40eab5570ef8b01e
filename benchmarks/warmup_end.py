"""Where warm-up ends by itself, and what that costs: against shares of the run chosen by hand.

    python -m benchmarks.warmup_end --corpus TEXTS --heldout OTHER_TEXTS

1-bit Adam, whose warm-up takes 5, 15 or 30 % of the steps, or as many as `variance_stable` says,
without and with refreshes of the variance after it; and Adam. On three tasks, at two learning rates
each: a byte-level language model, BERT, and a regression whose gradients shrink late: its noise
falls to a twentieth in the sixth tenth of the run. Workers are simulated on one device.

A loss is the training loss, the mean of the last twentieth of the steps; beside it, what that is to
the best of the three shares. Bytes are what a worker sends in the whole run, to the shortest of the
shares that end within 0.5 % of the best. The warm-up is in float32, with refreshes in 8 bits.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh

from onebit_jax.transforms.phases import Phase
from train import record
from train.compare_options import Options
from train.trainer import Task, Trainer, make_task
from train.workers import AXIS, Simulated, shares, worker_gradients

SHARES = 0.05, 0.15, 0.3
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


def late_task(steps: int, workers: Simulated) -> Task:
    """Regression on a teacher network of two layers, whose targets are noisy for half of the run.

    Args:
        steps: length of the run.
        workers: who trains.
    """
    rows, inputs, hidden, outputs = 64, 32, 128, 16
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    teacher = normal(inputs, 64) * 2 / math.sqrt(inputs), normal(64, outputs) / 8

    def batch(noise: float) -> dict[str, np.ndarray]:
        x = normal(rows, inputs)
        y = np.tanh(x @ teacher[0]) @ teacher[1]
        return {"x": x, "y": y + np.float32(noise) * normal(rows, outputs)}

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        x = batch["x"]
        for name in ("first", "second"):
            x = jax.nn.gelu(x @ params[name] + params[f"{name}_bias"])
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2), {}

    def noise(step: int) -> float:
        return 2.0 * 0.05 ** min(max(step / steps * 10 - 5, 0.0), 1.0)

    sizes = {"first": (inputs, hidden), "second": (hidden, hidden), "last": (hidden, outputs)}
    params = {name: jnp.array(normal(*size)) / size[0] ** 0.5 for name, size in sizes.items()}
    params |= {name: jnp.zeros(hidden) for name in ("first_bias", "second_bias")}
    batches = [shares(batch(noise(step)), workers.count) for step in range(steps)]
    judged_on = [batch(0.0) for _ in range(16)]
    loss = jax.jit(lambda p, b: loss_fn(p, b)[0])
    return Task(
        params,
        workers,
        jax.jit(workers.map(worker_gradients(loss_fn))),
        batches,
        lambda params: float(np.mean([loss(params, b) for b in judged_on])),
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )


def measure(options: WarmupEndOptions, mesh: Mesh) -> list[dict[str, Any]]:
    """The figures of all trainings."""
    figures = []
    for name in options.tasks:
        common = Options(
            task="bert" if name == "bert" else "lm",
            corpus=options.corpus,
            heldout=options.heldout,
            devices=False,
            workers=options.workers,
            batch_size=8,
            sequence_length=64,
            steps=options.steps,
            schedule_warmup=options.steps // 20,
            eval_batches=32,
        )
        workers = Simulated(options.workers)
        task = (
            late_task(options.steps, workers) if name == "late" else make_task(common, workers, 0)
        )
        of_run = [round(share * options.steps) for share in SHARES]
        kinds = [("adam", 1), *(("onebit_adam", number) for number in of_run)]
        for optimizer, warmup in [*kinds, ("onebit_adam", "auto"), ("onebit_adam_refresh", "auto")]:
            trainer = Trainer(optimizer, dataclasses.replace(common, warmup=warmup), task, mesh)
            sent: dict[Phase, int] = {}
            for rate in RATES[name]:
                run = trainer.train(task, rate)
                phases = trainer.phases(run["frozen_at"])
                sent |= trainer.bytes_sent([phase for phase in phases if phase not in sent])
                figures.append(
                    {
                        "task": name,
                        "learning_rate": rate,
                        "optimizer": optimizer,
                        "warmup": warmup,
                        "frozen_at": run["frozen_at"],
                        "loss": statistics.fmean(run["losses"][-(options.steps // 20) :]),
                        "heldout": run["heldout"],
                        "bytes": sum(sent[phase] for phase in phases),
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
        by_hand = [x for (name, end), x in of.items() if name == "onebit_adam" and end != "auto"]
        best = min(x["loss"] for x in by_hand)
        as_good = min(x["bytes"] for x in by_hand if x["loss"] <= TOLERANCE * best)
        auto, refreshed = of["onebit_adam", "auto"], of["onebit_adam_refresh", "auto"]

        def to_best(x: dict[str, Any], best: float = best) -> str:
            return f"{x['loss']:.4f} ({x['loss'] / best - 1:+.2%})"

        line = [task, f"{rate:g}", to_best(of["adam", 1]), *map(to_best, by_hand)]
        line += [to_best(auto), str(auto["frozen_at"]), f"{auto['bytes'] / as_good:.2f}"]
        lines.append([*line, to_best(refreshed), f"{refreshed['bytes'] / as_good:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(WarmupEndOptions, prog="python -m benchmarks.warmup_end")
    jax.config.update("jax_num_cpu_devices", options.workers)
    devices = jax.devices("cpu")[: options.workers]
    try:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((options.workers,), (AXIS,), axis_types=auto, devices=devices)
        figures = measure(options, mesh)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record.write(options.json, options, figures, "flax")
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
