"""Two processes that do not make the same step: told so at its first call, before they could wait.

Run as `python -m tests.test_hostile_processes FOLDER PROCESSES RANK PORT` it is one of them.
"""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.processes import join_processes, run_processes

DIFFERS = "is not the same on all processes, but every process must give all of it"
# What the second process has otherwise, and what it is told.
CASES = {
    "max_skipped": "differ in max_skipped",
    "program": "differ in max_skipped, the loss, the optimizer, arrays that they capture or",
    "accumulation": "differ in accumulation, the loss",
    "warmup": "differ in the loss, the optimizer, arrays that they capture or the shapes of",
    "captured": "differ in the loss, the optimizer, arrays that they capture or",
    "rows": f"batch, of shape (8, 5), {DIFFERS}. If each process has its own rows, make a global "
    "array of them: jax.make_array_from_process_local_data",
    "params": f"params['w'], of shape (5,), {DIFFERS}. Give all processes the same",
    "params of a step": f"params['w'], of shape (5,), {DIFFERS}. Give all processes the same",
    "extra argument": f"extra_args['value'], of shape (), {DIFFERS}. Give all processes the same",
    "x64": "differ in jax_enable_x64",
    "prng": "differ in jax_default_prng_impl",
    "flags": "differ in XLA_FLAGS",
    "nothing": "",
}


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


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
        step = onebit_jax.train_step(loss_fn, tx, mesh, **(options if second else {}))
        zeros = np.zeros(5, np.float32)
        params = {"w": zeros + second * (case == "params")}
        extra: dict[str, Any] = {"value": np.float32(rank)} if case == "extra argument" else {}
        batch = np.full((8, 5), 1.0 + rank * (case == "rows"), np.float32)
        try:
            prng = "rbg" if second and case == "prng" else "threefry2x32"
            # JAX has read its flags; what is compared is what it was started with.
            flags = "--xla_cpu_enable_fast_math=true" if second and case == "flags" else ""
            os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder / str(rank)} {flags}"
            with jax.enable_x64(second and case == "x64"), jax.default_prng_impl(prng):
                state = onebit_jax.init(tx, params, mesh)
                params["w"] += second * (case == "params of a step")
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
