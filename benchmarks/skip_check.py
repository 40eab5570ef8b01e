"""Times a step of `train.lm` that looks for gradients that are not finite beside one that does not.

    python -m benchmarks.skip_check
    python -m benchmarks.skip_check --optimizers adam --max-grad-norm None

The steps with `max_skipped=None` and with 10 take turns in one process, and which of them begins
does too. What is told is processor time, of all threads: on a machine that others use as well, wall
time says little of two per cent. Quote the ratio, which is the median of those of the turns.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any, Literal

import jax
import tyro
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks.counts import check_counts
from train import record, training
from train.config import AXIS
from train.lm.config import Config
from train.lm.pretrain import make_task
from train.optimizers import OPTIMIZERS

# The first is dense, whatever the optimizer; with the next, both phases are compiled.
_LEAD_IN = 3
_SETTINGS = (None, 10)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    optimizers: tuple[str, ...] = ("adam", "onebit_adam_frozen")
    """Of `train/optimizers.py`. The first updates of `onebit_adam` are all refreshes."""
    size: Literal["nano", "micro", "small", "medium"] = "nano"
    """Size of the model."""
    workers: int = 2
    """Workers, a simulated device each."""
    batch_size: int = Config.batch_size
    """Sequences in a step, of all workers together."""
    max_grad_norm: float | None = Config.max_grad_norm
    """As for `onebit_jax.train_step`: with it a step takes the gradients' norm anyway. Without it a
    1-bit Adam whose variance is that of one step diverges, and the run ends."""
    rounds: int = 25
    """How often the two take turns."""
    steps: int = 3
    """Steps in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/skip_check.json")
    """File to write the figures to."""


def measure(options: Options, optimizer: str) -> dict[int | None, list[float]]:
    """Seconds of processor time per step in each turn, for each `max_skipped`."""
    config = Config(
        size=options.size, workers=options.workers, batch_size=options.batch_size, warmup=1
    )
    task = make_task(config)
    mesh = jax.make_mesh((options.workers,), (AXIS,), axis_types=(AxisType.Auto,))
    batch = training.to_mesh(next(task.batches()), mesh)
    tx = training.make_optimizer(optimizer, config, task.mask)
    steps, states = {}, dict[int | None, Any]()
    for setting in _SETTINGS:
        steps[setting] = onebit_jax.train_step(
            task.loss_fn, tx, mesh, max_grad_norm=options.max_grad_norm, max_skipped=setting
        )
        params = jax.jit(task.init, out_shardings=NamedSharding(mesh, P()))()
        states[setting] = params, onebit_jax.init(tx, params, mesh)

    def turn(setting: int | None, count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            params, opt_state, _ = steps[setting](*states[setting], batch)
            states[setting] = params, opt_state
        jax.block_until_ready(states[setting])
        return (time.process_time() - start) / count

    for setting in _SETTINGS:
        turn(setting, _LEAD_IN)
    seconds: dict[int | None, list[float]] = {setting: [] for setting in _SETTINGS}
    for i in range(options.rounds):
        for setting in _SETTINGS[:: 1 if i % 2 else -1]:
            seconds[setting].append(turn(setting, options.steps))
    return seconds


def main(options: Options) -> None:
    """Runs the benchmark."""
    check_counts(options, "rounds", "steps", "workers")
    if unknown := set(options.optimizers) - set(OPTIMIZERS):
        known = ", ".join(OPTIMIZERS)
        raise SystemExit(
            f"error: --optimizers {', '.join(sorted(unknown))}: expected some of {known}"
        )
    jax.config.update("jax_num_cpu_devices", options.workers)
    print(f"{'milliseconds per step':24}{'None':>8}{'10':>8}{'ratio':>8}")
    figures = {}
    for optimizer in options.optimizers:
        without, looking = measure(options, optimizer).values()
        ratio = statistics.median(y / x for x, y in zip(without, looking, strict=True))
        print(f"{optimizer:24}", end="")
        print(f"{1e3 * statistics.median(without):8.1f}", end="")
        print(f"{1e3 * statistics.median(looking):8.1f}{ratio:8.3f}", flush=True)
        figures[optimizer] = {"None": without, "10": looking, "ratio": ratio}
    record.write(options.json, options, figures, "flax")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
