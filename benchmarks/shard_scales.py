"""One scale for each shard or for each tensor: loss and time of a language model that is sharded.

    python -m benchmarks.shard_scales --steps 300

1-bit Adam trains `train/lm` on (data 2, fsdp 4), eight simulated devices, once with each; beside
them with every worker on a single device, (data 2).
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from train.lm import data
from train.lm.model import LMConfig, init_params, next_token_loss

SLOW, FAST = "data", "fsdp"


def split_rows(params: Any) -> Any:
    """Every matrix by its rows over the fast axis, as FSDP does it; vectors whole."""
    return jax.tree.map(lambda x: P(FAST, None) if x.ndim == 2 else P(), params)


def draw(text: np.ndarray, count: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of sequences from anywhere in a text."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length - 1, count)
    rows = np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)
    return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def train(arguments: argparse.Namespace, texts: data.Texts, fsdp: int, scale_per: Any) -> None:
    """Trains one model and prints how it went."""
    mesh = jax.make_mesh(
        (2, fsdp),
        (SLOW, FAST),
        devices=jax.devices()[: 2 * fsdp],
        axis_types=(AxisType.Auto,) * 2,
    )
    config = LMConfig.of_size(arguments.size)
    params = init_params(config, arguments.seed)
    specs = split_rows(params)
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, arguments.learning_rate, arguments.steps // 20, arguments.steps
    )
    tx = onebit_jax.on_mesh(
        onebit_jax.onebit_adam(
            rate,
            warmup=arguments.steps // 5,
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
    for i in range(arguments.steps):
        batch = jax.device_put(
            draw(texts.train, arguments.batch_size, arguments.sequence_length, i), rows
        )
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    trained = jax.device_get(onebit_jax.worker_copy(state[0]))
    judge = jax.jit(lambda batch: loss_fn(trained, batch)[0])
    heldout = [
        judge(draw(texts.heldout, 32, arguments.sequence_length, 10**6 + i)) for i in range(8)
    ]
    compressed = seconds[arguments.steps // 5 + 2 :]
    print(
        f"(data 2, fsdp {fsdp}), one scale per {scale_per}: "
        f"training loss of the last tenth {np.mean(losses[-arguments.steps // 10 :]):.4f}, "
        f"held out {float(jnp.mean(jnp.stack(heldout))):.4f}, "
        f"median compressed step {1000 * statistics.median(compressed):.1f} ms",
        flush=True,
    )


def main() -> None:
    """Trains what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="nano")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["whole", "shard", "tensor"])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    texts = data.load(None, None)
    for name in arguments.only:
        fsdp, scale_per = (1, "shard") if name == "whole" else (4, name)
        train(arguments, texts, fsdp, scale_per)


if __name__ == "__main__":
    main()
