"""Records what the previous version (commit c0941f5) made of some steps with every optimizer.

    PYTHONPATH=CHECKOUT python tests/data/record_last_version.py

with a checkout of that version in the folder CHECKOUT writes `last_version.npz` beside this file:
for every case of `CASES` the parameters of all four workers after `WARMUP` updates and after 20
more, and the seed of its gradients. The seeds are such that no value is so near to 0 that a last
bit decides its sign, and with it the rest: gradients off by a millionth give the same.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import onebit_jax

PATH = pathlib.Path(__file__).with_name("last_version.npz")
WARMUP, COMPRESSED, WORKERS = 4, 20, 4
SHAPES = {"matrix": (6, 8), "vector": (9,), "scalar": ()}
FLAT, PAIR = "workers", ("node", "local")

# Two nodes exchanged in two stages, which that version had no name for.
_FIELDS = {field.name for field in dataclasses.fields(onebit_jax.ExchangeOptions)}
_FORM: dict[str, Any] = {"form": "two-stage"} if "form" in _FIELDS else {}
TWO_STAGES = onebit_jax.ExchangeOptions(**_FORM)
MEAN_ABS = onebit_jax.ExchangeOptions(scale="mean_abs", **_FORM)
FROZEN: dict[str, Any] = {"warmup_bits": 32, "variance_refreshes": None}
# All that changes a result is given: defaults may change.
ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.97, "eps": 1e-8, "weight_decay": 0.01}
LAMB = {
    "coeff_beta": 0.9,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
    "min_ratio": 0.5,
    "max_ratio": 4.0,
    "ratio_threshold": 0.1,
}
STEPS = {"var_update_scaler": 2, "local_step_scaler": 5, "local_step_clipper": 4}

BIRDER = {"b": 0.95, "weight_decay": 0.01, "seed": 3, "amsgrad": False}
LION: dict[str, Any] = {"b1": 0.9, "b2": 0.99, "weight_decay": 0.01}


def compressed_sgd(learning_rate: Any, *, axis_name: Any, **options: Any) -> Any:
    """SGD with momentum behind a compressed mean."""
    return optax.chain(
        onebit_jax.compressed_mean(axis_name, **options), optax.sgd(learning_rate, momentum=0.9)
    )


def local_adam(learning_rate: Any, *, axis_name: Any, **options: Any) -> Any:
    """DiLoCo of Adam."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return onebit_jax.local_steps(optax.adam(learning_rate), outer, axis_name=axis_name, **options)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "onebit_adam": (
        "onebit_adam",
        FLAT,
        ADAM | FROZEN | {"warmup": WARMUP, "bias_correction": True},
    ),
    "onebit_adam, nodes": (
        "onebit_adam",
        PAIR,
        ADAM | FROZEN | {"warmup": WARMUP, "bias_correction": False, "exchange": MEAN_ABS},
    ),
    "onebit_lamb": ("onebit_lamb", FLAT, ADAM | LAMB | {"warmup": WARMUP}),
    "onebit_lamb, nodes": (
        "onebit_lamb",
        PAIR,
        ADAM | LAMB | {"warmup": WARMUP, "exchange": TWO_STAGES},
    ),
    "zero_one_adam": ("zero_one_adam", FLAT, ADAM | STEPS | {"variance_freeze": 2 * WARMUP}),
    "zero_one_adam, nodes": (
        "zero_one_adam",
        PAIR,
        ADAM | STEPS | {"variance_freeze": 2 * WARMUP, "exchange": TWO_STAGES},
    ),
    "birder": ("birder", FLAT, BIRDER | {"transport": "bits", "requantize": True}),
    "birder, votes": ("birder", FLAT, BIRDER | {"transport": "votes", "requantize": True}),
    "birder, means": ("birder", FLAT, BIRDER | {"transport": "bits", "requantize": False}),
    "birder, nodes": ("birder", PAIR, BIRDER | {"transport": "bits", "requantize": True}),
    "distributed_lion": ("distributed_lion", FLAT, LION | {"aggregation": "majority"}),
    "distributed_lion, means": ("distributed_lion", FLAT, LION | {"aggregation": "mean"}),
    "signum": ("signum", FLAT, {"b1": 0.9, "weight_decay": 0.01}),
    "ef_signsgd": ("ef_signsgd", FLAT, {"momentum": 0.9, "weight_decay": 0.01}),
    "ef_signsgd, nodes": (
        "ef_signsgd",
        PAIR,
        {
            "momentum": 0.9,
            "weight_decay": 0.01,
            "exchange": dataclasses.replace(TWO_STAGES, scale="mean_abs"),
        },
    ),
    "onebit_muon": ("onebit_muon", FLAT, {"bits": 1, "weight_decay": 0.01}),
    "onebit_muon, 4 bits": ("onebit_muon", FLAT, {"bits": 4, "weight_decay": 0.01}),
    "compressed_mean, 1 bit": (compressed_sgd, FLAT, {"bits": 1, "residual_decay": 0.9}),
    "compressed_mean, 2 bits": (compressed_sgd, FLAT, {"bits": 2}),
    "compressed_mean, 4 bits, nodes": (
        compressed_sgd,
        PAIR,
        {"bits": 4, "exchange": TWO_STAGES},
    ),
    "compressed_mean, 8 bits": (compressed_sgd, FLAT, {"bits": 8}),
    "local_steps, 1 bit": (local_adam, FLAT, {"every": 4, "bits": 1}),
    "local_steps, 4 bits, fragments": (local_adam, FLAT, {"every": 4, "bits": 4, "fragments": 2}),
    "local_steps, 32 bits": (local_adam, FLAT, {"every": 4, "bits": 32}),
}


def learning_rate(count: Any) -> Any:
    """That of every case, a function of the update count."""
    return 1e-2 / (1 + 0.1 * count)


def gradients(seed: int) -> dict[str, np.ndarray]:
    """`[workers, updates, ...]`; of the matrix a row begins to have any after `WARMUP`."""
    rng = np.random.default_rng(seed)
    drawn = {
        name: rng.standard_normal((WORKERS, WARMUP + COMPRESSED, *shape), np.float32)
        for name, shape in SHAPES.items()
    }
    drawn["matrix"][:, :WARMUP, 2] = 0
    return drawn


def trajectory(case: str) -> Callable[[Any], dict[str, Any]]:
    """Makes of gradients the parameters that are recorded, `[workers, 2, ...]`."""
    name, axis_name, options = CASES[case]
    make = getattr(onebit_jax, name) if isinstance(name, str) else name
    tx = make(learning_rate, axis_name=axis_name, **options)
    rng = np.random.default_rng(0)
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}

    def worker(gradients: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        params = jax.tree.map(jnp.asarray, start)
        _, history = lax.scan(step, (params, tx.init(params)), gradients)
        return jax.tree.map(lambda p: p[jnp.array([WARMUP - 1, -1])], history)

    if isinstance(axis_name, str):
        return jax.jit(jax.vmap(worker, axis_name=axis_name))
    nodes = jax.vmap(jax.vmap(worker, axis_name=axis_name[1]), axis_name=axis_name[0])

    def on_nodes(gradients: Any) -> Any:
        result = nodes(jax.tree.map(lambda g: g.reshape(2, 2, *g.shape[1:]), gradients))
        return jax.tree.map(lambda p: p.reshape(WORKERS, *p.shape[2:]), result)

    return jax.jit(on_nodes)


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference, relative to each tensor's largest value."""
    return max(
        float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max())
        for name in theirs
    )


def record() -> None:
    """Writes the file."""
    recorded = {}
    for case in CASES:
        run = trajectory(case)
        for seed in itertools.count():
            tape = gradients(seed)
            result = jax.device_get(run(tape))
            noise = [gradients(1000 + i) for i in range(5)]
            others = [
                run({name: g * (1 + 1e-6 * other[name]) for name, g in tape.items()})
                for other in noise
            ]
            if all(distance(jax.device_get(other), result) < 2e-6 for other in others):
                break
        print(f"{case}: seed {seed}")
        recorded[f"{case}/seed"] = np.int64(seed)
        recorded |= {f"{case}/{name}": p for name, p in result.items()}
    np.savez_compressed(PATH, **recorded)


if __name__ == "__main__":
    record()
