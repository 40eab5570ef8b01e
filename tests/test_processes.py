"""Several processes: four train as one does, two share checkpoints, or disagree and are told so.

Run as `python -m tests.test_processes FOLDER PROCESSES RANK PORT` it is one that disagrees.
"""

import functools
import os
import pathlib
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.process_worker import WORKERS
from tests.processes import join_processes, run_processes
from tests.train.together import ended, free_address, started

TOLERANCE = 1e-5  # relative to each tensor's largest value


@pytest.mark.slow
def test_four_processes_train_as_one_does(tmp_path):
    together, apart = run_processes(tmp_path, 1), run_processes(tmp_path, WORKERS)
    found = [str(apart.pop(f"found by {rank}")) for rank in range(WORKERS)]
    assert {*found, str(together.pop("found by 0"))} == {
        """(Divergence(tensor="params['out']", workers=(2,)),)"""
    }
    compared = together.pop("compared")
    assert "params['out']" in compared
    np.testing.assert_array_equal(apart.pop("compared"), compared)
    assert together.keys() == apart.keys()
    for name, expected in together.items():
        if name.startswith("step"):
            np.testing.assert_array_equal(apart[name], expected, err_msg=name)
        elif expected.dtype != np.uint8:  # bytes hold the scales, whose last bits may differ
            allowed = TOLERANCE * np.abs(expected).max(initial=0)
            np.testing.assert_allclose(apart[name], expected, 0, allowed, err_msg=name)
    compensated = [
        value
        for name, value in together.items()
        if name.startswith("step") and "m_then_compensated.value['out']" in name
    ]
    assert len(np.unique(compensated, axis=0)) == WORKERS


# Processes that share a folder of checkpoints.


@pytest.mark.slow
def test_what_one_process_cannot_read_none_uses(tmp_path):
    """A bit is flipped in what process 1 wrote; both go back to the checkpoint before it."""
    held = run_processes(tmp_path, 2, worker="tests.checkpoint.process_worker")
    for rank in range(2):
        assert held[f"{rank} step"].tolist() == [1, rank, 1]
        assert held[f"{rank} same"].tolist() == [True, 2]
    # Taken to two workers, both have what all together owed.
    np.testing.assert_array_equal(held["0 owed"], held["1 owed"])
    assert np.count_nonzero(held["0 owed"]) > 19_000


@pytest.mark.slow
def test_a_process_that_fails_does_not_wait_for_one_whose_part_of_a_checkpoint_failed(tmp_path):
    """The disk was full while a checkpoint was being written."""
    address, begin = free_address(), time.monotonic()
    worker = "tests.checkpoint.failing_worker"
    commands = [[worker, address, str(rank), str(tmp_path / "run")] for rank in range(2)]
    with started(commands) as processes:
        codes, [own, other] = ended(processes)
    assert codes == [-signal.SIGABRT] * 2, (own, other)
    assert "No space left on device" in own
    # JAX's timeout is 30 s too; Orbax would have waited for 300.
    assert time.monotonic() - begin < 200


# Processes that do not make the same step, or from other numbers.

_PROGRAM = "the loss, the optimizer or shapes"
# What the second process has otherwise, and what both are told that they differ in.
CASES = {
    "max_skipped": "the options of train_step",
    "warmup": _PROGRAM,
    "captured": _PROGRAM,
    "direction": _PROGRAM,
    "x64": "JAX's settings",
    "precision": "JAX's settings",
    "prng": "JAX's settings",
    "flags": "XLA_FLAGS",
    "seed": "['params']['w']",
    "checkpoint": "['opt_state'][0].progress.count",
    "later checkpoint": "['opt_state'][0].progress.count",
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
    params: Any = {"w": zeros}
    state = onebit_jax.init(tx, params, mesh)
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
    mesh, told = jax.make_mesh((processes,), ("data",)), {}
    for case in CASES:
        second = rank == 1
        warmup = 5 if second and case == "warmup" else 3
        learning_rate = jnp.float32(2e-2 if second and case == "captured" else 1e-2)
        tx = onebit_jax.onebit_adam(learning_rate, warmup=warmup, axis_name="data")
        if case == "direction":
            tx = optax.chain(tx, optax.stateless(functools.partial(running_sums, second)))
        max_skipped = 3 if second and case == "max_skipped" else 10
        step = onebit_jax.train_step(loss_fn, tx, mesh, max_skipped=max_skipped)
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
                params, state, _ = step(params, state, np.ones((8, 5), np.float32))
            told[case] = np.array("")
        except ValueError as error:
            told[case] = np.array(str(error))
    rows = NamedSharding(mesh, P("data"))
    batch = jax.make_array_from_process_local_data(rows, np.ones((4, 5), np.float32))
    *_, metrics = step(params, state, batch)
    told["skipped"] = np.asarray(metrics["skipped"])
    return {f"{rank} {case}": said for case, said in told.items()}


@pytest.mark.slow
def test_processes_that_make_different_steps_are_told_what_differs(tmp_path):
    told = run_processes(tmp_path, 2, "tests.test_processes")
    for case, differing in CASES.items():
        for rank in (0, 1):
            text = str(told[f"{rank} {case}"])
            message = f"processes make different training steps: they differ in {differing}"
            assert text.startswith(message) if differing else not text, (case, rank, text)
    assert told["0 skipped"] == 0


if __name__ == "__main__":
    join_processes(main, workers=2)
