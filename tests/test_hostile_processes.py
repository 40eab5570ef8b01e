"""Two processes that do not make the same step, or from other numbers: told so before they wait.

Run as `python -m tests.test_hostile_processes FOLDER PROCESSES RANK PORT` it is one of them.
"""

import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.processes import join_processes, run_processes

DIFFERS = "is not the same on all processes, but every process must give all of it"
# What the second process has otherwise, and what it is told.
_PROGRAM = "differ in the loss, the optimizer or arrays that they capture"
CASES = {
    "max_skipped": "differ in max_skipped",
    "program": "differ in max_skipped",
    "accumulation": "differ in accumulation",
    "warmup": _PROGRAM,
    "captured": _PROGRAM,
    "direction": _PROGRAM,
    "rows": f"batch, of shape (8, 5), {DIFFERS}. If each process has its own rows, make a global "
    "array of them: jax.make_array_from_process_local_data",
    "params": f"params['w'], of shape (5,), {DIFFERS}. Give all processes the same",
    "params of a step": f"params['w'], of shape (5,), {DIFFERS}. Give all processes the same",
    "extra argument": f"extra_args['value'], of shape (), {DIFFERS}. Give all processes the same",
    "x64": "differ in jax_enable_x64",
    "precision": "differ in jax_default_matmul_precision",
    "prng": "differ in jax_default_prng_impl",
    "flags": "differ in XLA_FLAGS",
    "seed": "params['w'] is not the same on all processes",
    "checkpoint": "opt_state[0].progress.count is not the same on all processes",
    "later checkpoint": "opt_state[0].progress.count is not the same on all processes",
    "nothing": "",
}


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def running_sums(reverse, updates, params):
    del params
    return jax.tree.map(lambda x: jax.lax.cumsum(x, reverse=reverse), updates)


def on_all(mesh, x):
    """A global array of which this process gives its own device's copy, compared with no other."""
    own = jax.device_put(x, jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, P()), [own])


def begun(case, step, tx, mesh, rank):
    """Parameters and state, in some cases others on the second process."""
    zeros = np.zeros(5, np.float32)
    params: Any = {"w": zeros + rank * (case == "params")}
    state = onebit_jax.init(tx, params, mesh)
    if case == "params of a step":
        params = {"w": zeros + rank}
    if case == "seed":
        params = {"w": on_all(mesh, zeros + np.float32(rank))}
    if case == "later checkpoint":
        params, state, _ = step(params, state, np.ones((8, 5), np.float32))
    if "checkpoint" in case:
        # As restored from this process's own disk.
        own, *others = state
        progress = own.progress._replace(count=on_all(mesh, np.int32(rank)))
        state = (own._replace(progress=progress), *others)
    return params, state


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, np.ndarray]:
    mesh = jax.make_mesh((processes,), ("data",))
    told = {}
    for case in CASES:
        second = rank == 1
        options = {
            "max_skipped": {"max_skipped": 3},
            "program": {"max_skipped": None},
            "accumulation": {"accumulation": 2},
        }.get(case, {})
        warmup = 5 if second and case == "warmup" else 3
        learning_rate = jnp.float32(2e-2 if second and case == "captured" else 1e-2)
        tx = onebit_jax.onebit_adam(learning_rate, warmup=warmup, axis_name="data")
        if case == "direction":
            tx = optax.chain(tx, optax.stateless(functools.partial(running_sums, second)))
        step = onebit_jax.train_step(loss_fn, tx, mesh, **(options if second else {}))
        extra: dict[str, Any] = {"value": np.float32(rank)} if case == "extra argument" else {}
        batch = np.full((8, 5), 1.0 + rank * (case == "rows"), np.float32)
        try:
            params, state = begun(case, step, tx, mesh, rank)
            prng = "rbg" if second and case == "prng" else "threefry2x32"
            precision = "float32" if second and case == "precision" else None
            # JAX has read its flags; what is compared is what it was started with.
            flags = "--xla_cpu_enable_fast_math=true" if second and case == "flags" else ""
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder / str(rank)} {flags}"
            with (
                jax.enable_x64(second and case == "x64"),
                jax.default_prng_impl(prng),
                jax.default_matmul_precision(precision),
            ):
                params, state, _ = step(params, state, batch, **extra)
            told[case] = np.array("")
        except ValueError as error:
            told[case] = np.array(str(error))
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), batch[:4])
    *_, metrics = step(params, state, rows)
    told["skipped"] = np.asarray(metrics["skipped"])
    return {f"{rank} {case}": said for case, said in told.items()}


@pytest.mark.slow
def test_processes_that_make_different_steps_are_told_what_differs(tmp_path):
    told = run_processes(tmp_path, 2, "tests.test_hostile_processes")
    for case, message in CASES.items():
        for rank in (0, 1):
            text = str(told[f"{rank} {case}"])
            assert message in text if message else not text, (case, rank, text)
    assert told["0 skipped"] == 0


if __name__ == "__main__":
    join_processes(main, workers=2)
