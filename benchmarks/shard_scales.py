"""One scale for each shard or for each tensor: loss and time of a language model that is sharded.

    python -m benchmarks.shard_scales --steps 300

1-bit Adam trains `train/lm` on (data 2, fsdp 4), eight simulated devices, once with each; beside
them with every worker on a single device, (data 2).
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from train import record
from train.lm import data
from train.lm.model import LMConfig, init_params, next_token_loss

SLOW, FAST = "data", "fsdp"

Way = Literal["whole", "shard", "tensor"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to train."""

    size: str = "nano"
    """Size of the model."""
    steps: int = 300
    """Updates of a run, of which a fifth are warm-up."""
    batch_size: int = 16
    """Sequences in a step, of all workers."""
    sequence_length: int = 64
    """Tokens of a sequence."""
    learning_rate: float = 4e-3
    """The peak of the schedule."""
    seed: int = 0
    """Of the parameters."""
    only: tuple[Way, ...] = ("whole", "shard", "tensor")
    """Every worker on one device, one scale for each shard, one scale for each tensor."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/shard_scales.json")
    """File to write the figures to."""


def split_rows(params: Any) -> Any:
    """Every matrix by its rows over the fast axis, as FSDP does it; vectors whole."""
    return jax.tree.map(lambda x: P(FAST, None) if x.ndim == 2 else P(), params)


def draw(text: np.ndarray, count: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of sequences from anywhere in a text."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, count)
    rows = np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def train(options: Options, texts: data.Texts, way: Way) -> dict[str, float]:
    """Trains one model, and says how it went."""
    fsdp, scale_per = (1, "shard") if way == "whole" else (4, way)
    mesh = jax.make_mesh(
        (2, fsdp),
        (SLOW, FAST),
        devices=jax.devices()[: 2 * fsdp],
        axis_types=(AxisType.Auto,) * 2,
    )
    config = LMConfig.of_size(options.size)
    params = init_params(config, options.seed)
    specs = split_rows(params)
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.steps // 20, options.steps
    )
    tx = onebit_jax.on_mesh(
        onebit_jax.onebit_adam(
            rate,
            warmup=options.steps // 5,
            axis_name=SLOW,
            exchange=onebit_jax.ExchangeOptions(scale_per=scale_per),
        ),
        mesh,
        axis_name=SLOW,
        specs=split_rows,
    )
    loss_fn = next_token_loss(config)

    def train_step(state: Any, batch: Any) -> Any:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), {"loss": loss}

    state = onebit_jax.worker_copies((params, tx.init(params)), mesh, axis_name=SLOW)
    step = jax.jit(onebit_jax.worker_step(train_step, mesh, axis_name=SLOW), donate_argnums=0)
    rows = NamedSharding(mesh, P((SLOW, FAST)))
    losses, seconds = [], []
    for i in range(options.steps):
        batch = jax.device_put(
            draw(texts.train, options.batch_size, options.sequence_length, i), rows
        )
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    trained = jax.device_get(onebit_jax.worker_copy(state[0]))
    judge = jax.jit(lambda batch: loss_fn(trained, batch)[0])
    heldout = [judge(draw(texts.heldout, 32, options.sequence_length, 10**6 + i)) for i in range(8)]
    figures = {
        "training loss of the last tenth": float(np.mean(losses[-options.steps // 10 :])),
        "held-out loss": float(jnp.mean(jnp.stack(heldout))),
        "compressed step, ms": 1000 * statistics.median(seconds[options.steps // 5 + 2 :]),
    }
    told = ", ".join(f"{name} {figure:.4f}" for name, figure in figures.items())
    print(f"(data 2, fsdp {fsdp}), one scale per {scale_per}: {told}", flush=True)
    return figures


def main(options: Options) -> None:
    """Trains what the command line names."""
    jax.config.update("jax_num_cpu_devices", 8)
    texts = data.load(None, None)
    figures = {way: train(options, texts, way) for way in options.only}
    record.write(options.json, options, figures)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
