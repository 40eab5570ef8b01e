"""What rare tokens do to optimizers whose variance is frozen, with and without a bound on steps.

    python -m benchmarks.rare_tokens --corpus TEXTS

A small model of bytes, whose embedding of the eight bytes before is not tied to its output: bytes
that are rare in the text seldom have a gradient. Workers are simulated by `vmap`.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

import onebit_jax
from benchmarks.counts import check_counts
from train import record
from train.lm.data import load

AXIS, VOCAB, WIDTH, HIDDEN, BEFORE = "workers", 256, 16, 96, 8
CHUNK, JUDGED_ON = 1000, 20_000
DENSE = "Adam", "Adam, averages at few bits", "LAMB"


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains each optimizer with its own bound, and without one."""

    corpus: str | None = None
    """Folder of plain-text files; without it, the language reference that Python carries."""
    workers: int = 4
    """Simulated workers."""
    batch_size: int = 16
    """Examples of a worker in a step."""
    steps: int = 15_000
    """Steps of a training, a multiple of 1,000."""
    warmup: int = 1000
    """Dense steps of those that begin with such and do not end them by themselves."""
    warmup_bits: int = 4
    """Bits of gradients in the warm-ups of 1-bit Adam and 1-bit LAMB."""
    seeds: tuple[int, ...] = (0, 1)
    """A training for each."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/rare_tokens.json")
    """File to write the figures to."""


def optimizers(options: Options) -> dict[str, tuple[float, Callable[..., Any]]]:
    """By name, the learning rate, and what makes the optimizer from a schedule and a bound."""
    dense, ends = onebit_jax.mean_gradients(AXIS), {"warmup": options.warmup, "axis_name": AXIS}
    of_itself = onebit_jax.variance_stable(min_steps=options.warmup // 2)
    few: dict[str, Any] = {"warmup_bits": options.warmup_bits, "axis_name": AXIS}
    return {
        "Adam": (2e-3, lambda rate: optax.chain(dense, optax.adam(rate))),
        "Adam, averages at few bits": (
            2e-3,
            lambda rate: onebit_jax.onebit_adam(rate, warmup=options.steps + 1, **few),
        ),
        "1-bit Adam": (
            2e-3,
            lambda rate, **own: onebit_jax.onebit_adam(rate, warmup=of_itself, **few, **own),
        ),
        "1-bit Adam, frozen": (
            2e-3,
            lambda rate, **own: onebit_jax.onebit_adam(
                rate, warmup=options.warmup, variance_refreshes=None, **few, **own
            ),
        ),
        "0/1 Adam": (
            2e-3,
            lambda rate, **own: onebit_jax.zero_one_adam(
                rate, variance_freeze=2 * options.warmup, axis_name=AXIS, **own
            ),
        ),
        "LAMB": (4e-3, lambda rate: optax.chain(dense, optax.lamb(rate))),
        "1-bit LAMB": (
            4e-3,
            lambda rate, **own: onebit_jax.onebit_lamb(rate, warmup=of_itself, **few, **own),
        ),
        "1-bit LAMB, published": (
            4e-3,
            lambda rate, **own: onebit_jax.onebit_lamb_published(rate, **ends, **own),
        ),
    }


def initial_parameters(key: jax.Array) -> dict[str, jax.Array]:
    """A hidden layer between an embedding and the output."""
    keys, inputs = jax.random.split(key, 3), BEFORE * WIDTH
    return {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)) / 2,
        "hidden": jax.random.normal(keys[1], (inputs, HIDDEN)) / inputs**0.5,
        "hidden_bias": jnp.zeros(HIDDEN),
        "output": jax.random.normal(keys[2], (HIDDEN, VOCAB)) / (2 * HIDDEN**0.5),
        "output_bias": jnp.zeros(VOCAB),
    }


def loss_fn(params: Any, text: jax.Array, starts: jax.Array) -> jax.Array:
    """The cross-entropy of the byte that follows the eight from each start."""
    window = text[starts[:, None] + jnp.arange(BEFORE + 1)].astype(jnp.int32)
    x = params["embedding"][window[:, :BEFORE]].reshape(len(starts), -1)
    x = jax.nn.gelu(x @ params["hidden"] + params["hidden_bias"])
    logits = x @ params["output"] + params["output_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, BEFORE]).mean()


def train(tx: Any, options: Options, seed: int, texts: Any) -> dict[str, float | None]:
    """A training: its last losses, the held-out loss, and the embedding's largest number.

    None is for what is not finite.
    """
    text, heldout = map(jnp.asarray, (texts.train, texts.heldout))
    first, batches = jax.random.split(jax.random.key(seed))

    def everywhere(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (options.workers, *x.shape))

    params = jax.tree.map(everywhere, initial_parameters(first))
    state = jax.vmap(tx.init, axis_name=AXIS)(params)

    def step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        starts = jax.random.randint(key, (options.batch_size,), 0, len(text) - BEFORE)
        loss, grads = jax.value_and_grad(loss_fn)(params, text, starts)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def steps(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        def one(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            keys, (params, state) = jax.random.split(key, options.workers), carry
            params, state, loss = jax.vmap(step, axis_name=AXIS)(params, state, keys)
            return (params, state), loss.mean()

        (params, state), losses = lax.scan(one, (params, state), jax.random.split(key, CHUNK))
        return params, state, losses.mean()

    loss = jnp.nan
    for chunk in range(options.steps // CHUNK):
        params, state, loss = steps(params, state, jax.random.fold_in(batches, chunk))
    own = jax.tree.map(lambda x: x[0], params)
    starts = jax.random.randint(jax.random.key(0), (JUDGED_ON,), 0, len(heldout) - BEFORE)
    found = {
        "loss": float(loss),
        "heldout": float(jax.jit(loss_fn)(own, heldout, starts)),
        "largest": float(jnp.abs(own["embedding"]).max()),
    }
    return {name: x if math.isfinite(x) else None for name, x in found.items()}


def median(runs: list[dict[str, float | None]], name: str) -> float | None:
    """The median of the runs; None if one of them is not finite."""
    values = [run[name] for run in runs]
    finite = [x for x in values if x is not None]
    return statistics.median(finite) if len(finite) == len(values) else None


def measure(options: Options) -> dict[str, dict[str, Any]]:
    """The figures of all trainings by label: medians over seeds, and each.

    Raises:
      ValueError: for steps that are no multiple of 1,000, and for a corpus that is unfit.
    """
    if options.steps < CHUNK or options.steps % CHUNK:
        raise ValueError(f"steps={options.steps} must be a multiple of {CHUNK}, such as 15000.")
    texts, figures = load(options.corpus, None), {}
    for name, (peak, make) in optimizers(options).items():
        rate = optax.warmup_cosine_decay_schedule(0, peak, 500, options.steps, peak / 20)
        forms: dict[str, dict[str, Any]] = {name: {}}
        if name not in DENSE:
            forms[f"{name}, no bound"] = {"step_bound": None}
        for label, own in forms.items():
            runs = [train(make(rate, **own), options, seed, texts) for seed in options.seeds]
            medians = {figure: median(runs, figure) for figure in runs[0]}
            figures[label] = {"learning_rate": peak, **medians, "runs": runs}
            print(json.dumps({label: figures[label]}), flush=True)
    return figures


def main() -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(Options, prog="python -m benchmarks.rare_tokens")
    check_counts(options, "workers", "batch_size", "warmup")
    try:
        figures = measure(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record.write(options.json, options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
