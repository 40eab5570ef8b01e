"""Times whole BERT training steps: dense Adam against 1-bit Adam in warm-up and in compression.

    python -m benchmarks.bert_step --size mini --workers 4

Steps of the three kinds take turns in one process, so that a machine whose speed drifts slows all
of them; quote the ratios. Prints a table and, with --json, writes the figures with machine and
versions.
"""

import dataclasses
import json
import pathlib
import platform
import statistics
import sys
import time
from typing import Literal

import jax
import numpy as np
import optax
import tyro

import onebit_jax
from onebit_jax.transforms.phases import Phase
from train.bert.data import max_predictions
from train.bert.model import BertConfig, init_params, pretraining_loss


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    size: Literal["tiny", "mini", "small", "base", "large"] = "mini"
    """Size of the model."""
    vocab_size: int = 8192
    """Size of the vocabulary."""
    workers: int = 4
    """Workers, a device each; on CPUs the devices are simulated."""
    batch_size: int = 32
    """Sequences in a step, over all workers."""
    sequence_length: int = 64
    """Tokens in a sequence."""
    rounds: int = 15
    """How often the three kinds take turns."""
    steps: int = 4
    """Steps in a turn."""
    json: pathlib.Path | None = None
    """File to write the figures to."""


def random_batch(options: Options) -> dict[str, np.ndarray]:
    """A batch of random tokens, in the schema of `train.bert.data`."""
    rng = np.random.default_rng(0)
    rows, length = options.batch_size, options.sequence_length
    masked = max_predictions(length)
    return {
        "input_ids": rng.integers(5, options.vocab_size, (rows, length), dtype=np.int32),
        "token_type_ids": np.zeros((rows, length), np.int32),
        "attention_mask": np.ones((rows, length), np.int32),
        "masked_positions": rng.integers(1, length, (rows, masked), dtype=np.int32),
        "masked_labels": rng.integers(5, options.vocab_size, (rows, masked), dtype=np.int32),
        "masked_weights": np.ones((rows, masked), np.float32),
        "next_sentence_label": rng.integers(0, 2, rows, dtype=np.int32),
        "example_seed": rng.integers(0, 2**32, rows, dtype=np.uint32),
    }


def main(options: Options) -> None:
    """Runs the benchmark."""
    jax.config.update("jax_num_cpu_devices", options.workers)
    mesh = jax.make_mesh((options.workers,), ("data",), devices=jax.devices()[: options.workers])
    model = BertConfig.of_size(options.size, options.vocab_size)
    loss_fn, batch = pretraining_loss(model), random_batch(options)
    adam = optax.chain(onebit_jax.mean_gradients("data"), optax.adamw(1e-4))
    onebit_adam = onebit_jax.onebit_adam(1e-4, weight_decay=1e-4, warmup=1, axis_name="data")
    dense_forever = onebit_jax.onebit_adam(1e-4, weight_decay=1e-4, warmup=10**9, axis_name="data")
    kinds: dict[str, tuple[optax.GradientTransformation, Phase]] = {
        "Adam": (adam, "warmup"),
        "1-bit Adam, warm-up": (dense_forever, "warmup"),
        "1-bit Adam, compression": (onebit_adam, "compression"),
    }

    runs = {}
    for kind, (tx, phase) in kinds.items():
        params = init_params(model, seed=0)
        step = onebit_jax.train_step(loss_fn, tx, mesh, max_grad_norm=1.0)
        state = step(params, onebit_jax.init(tx, params, mesh), batch, phase="warmup")[:2]
        runs[kind] = step, step(*state, batch, phase=phase)[:2], phase
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, (step, state, phase) in runs.items():
            jax.block_until_ready(state)
            start = time.perf_counter()
            for _ in range(options.steps):
                state = step(*state, batch, phase=phase)[:2]
            jax.block_until_ready(state)
            times[kind].append((time.perf_counter() - start) / options.steps)
            runs[kind] = step, state, phase

    medians = {kind: statistics.median(values) for kind, values in times.items()}
    parameters = sum(x.size for x in jax.tree.leaves(init_params(model, seed=0)))
    print(f"BERT {options.size}, {parameters:,} parameters, {options.workers} workers")
    print(f"{'step':26}{'ms, median':>12}{'least':>9}{'most':>9}{'to Adam':>10}")
    for kind, values in times.items():
        least, most = 1e3 * min(values), 1e3 * max(values)
        ratio = medians[kind] / medians["Adam"]
        print(f"{kind:26}{1e3 * medians[kind]:12.1f}{least:9.1f}{most:9.1f}{ratio:10.3f}")
    if options.json:
        figures = {
            "command": " ".join(sys.argv),
            "machine": f"{platform.machine()}, {platform.processor() or platform.system()}",
            "device": jax.devices()[0].device_kind,
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "options": dataclasses.asdict(options) | {"json": str(options.json)},
            "seconds": times,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options))
