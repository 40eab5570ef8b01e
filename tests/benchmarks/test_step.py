"""What the benchmarks of steps and states say of phases, memory, bytes; at small sizes."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from benchmarks import compile as compilation
from benchmarks import gpu, state, step, tasks
from benchmarks.kinds import AXIS, kinds, onebit_adam
from benchmarks.loops import Run, make_mesh
from onebit_jax.collectives.layout import pack_flags, unpack_flags

ELEMENTS = 2**20
TASK = tasks.trivial(tasks.matrices(ELEMENTS, 4))
MEASURED = (
    "Adam with pmean",
    "Adam with pmean, train_step",
    "1-bit Adam",
    "1-bit Adam, own loop",
    "Signum",
    "EC1, exchange alone",
)
# Bytes of state an element on each of two workers, but for what does not grow; of other optimizers
# and workers tests/transforms/test_programs.py has them.
STATE = {"Adam with pmean": 8, "1-bit Adam": 8.25 + 4 / 2, "EC1, exchange alone": 4.125 + 4 / 2}


@pytest.fixture(scope="module")
def figures():
    """Of two workers."""
    return step.measure(TASK, 2, {name: kinds()[name] for name in MEASURED}, 1, 1)


@pytest.mark.slow
def test_live_buffers_are_what_the_state_says(figures):
    for kind, held in STATE.items():
        assert figures[kind]["state"] == pytest.approx(held, abs=0.05)


@pytest.mark.slow
def test_a_step_needs_at_most_an_array_more_than_adams_in_an_own_loop(figures):
    """The looks at gradients for NaNs included."""
    beside = {kind: x["peak"] - x["state"] for kind, x in figures.items()}
    for kind in ("Adam with pmean, train_step", "1-bit Adam", "Signum"):
        assert beside[kind] <= beside["Adam with pmean"] + 4, kind
    # It holds all phases: in a refresh the mean gradient, while the others are there.
    assert beside["1-bit Adam, own loop"] <= beside["Adam with pmean"] + 8.5


@pytest.mark.slow
def test_at_most_a_full_array_and_a_servers_chunk_are_written_besides(figures):
    """Beside parameters, gradients and state there is room for them, and for bits."""
    for kind in ("1-bit Adam", "Signum", "EC1, exchange alone"):
        assert figures[kind]["peak"] - figures[kind]["state"] - 8 < 6.6, kind


def test_the_readme_loop_is_timed_in_the_phase_that_the_kind_names_or_not_at_all():
    still_dense = onebit_adam(forever_dense=True)._replace(phases=("compression",))
    run = Run(still_dense, tasks.trivial(tasks.matrices(64)), make_mesh(2))
    run.begin()
    with pytest.raises(RuntimeError, match="is in phase 0, not in that of 'compression'"):
        run.lead_in()


def test_a_kind_that_exchanges_nothing_runs():
    run = Run(kinds()["Adam, no exchange"], TASK, make_mesh(2))
    run.begin()
    run.lead_in()
    assert run.turn(1) > 0
    run.end()


def test_writes_a_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step, "memory_bandwidth", lambda mesh: 1e9)
    monkeypatch.setattr(tasks, "MATRICES", 1)
    path, names = tmp_path / "step.json", ("Adam with pmean", "1-bit Adam")
    step.main(step.Options(elements=2**10, workers=8, kinds=names, rounds=2, steps=1, json=path))
    assert json.loads(path.read_text())["figures"]["kinds"].keys() == set(names)
    printed = capsys.readouterr().out
    assert printed.startswith("matrices, 1,024 elements, 8 workers, memory at 1 GB/s")
    assert "README's loop, 1-bit Adam: " in printed


@pytest.mark.slow
def test_compilation_is_timed_beside_the_dense_one(monkeypatch, capsys):
    names = list(compilation.programs())
    assert names[0] == "AdamW with pmean"
    made = {name: {"process": [4.0], "wall": [2.0]} for name in names}
    made["AdamW with pmean"]["process"] = [2.0]
    compilation.print_table(made)
    lines = capsys.readouterr().out.splitlines()
    ratios = dict(zip(names, (line.split()[-1] for line in lines[1:]), strict=True))
    assert ratios["AdamW with pmean"] == "1.00"
    assert ratios["1-bit Adam, compression"] == "2.00"

    first = {names[0]: compilation.programs()[names[0]]}
    monkeypatch.setattr(compilation, "programs", lambda: first)
    [figure] = compilation.measure("matrices", make_mesh(2), (), rounds=2).values()
    # A second compilation is as real as the first.
    assert len(figure["process"]) == 2
    assert min(figure["process"]) > 0


@pytest.mark.parametrize("elements", [1000, 8, 0, -16])
def test_a_size_that_cannot_be_cut_into_matrices_is_refused(elements):
    with pytest.raises(ValueError, match=f"elements={elements} must be a power of two, at least"):
        tasks.of_tree("matrices", elements)


# What lies on a device.


@pytest.mark.parametrize("workers", [2, 4])
def test_the_bytes_of_a_state_are_those_of_its_buffers_on_one_device(workers: int) -> None:
    params = {"w": jnp.zeros((64, 48)), "b": jnp.zeros((7,))}
    mesh = make_mesh(workers)
    tx = onebit_jax.onebit_adam(1e-3, axis_name=AXIS)
    placed = onebit_jax.init(tx, params, mesh)

    shapes = jax.eval_shape(lambda: params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert state.bytes_on_a_device(tx, shapes, mesh) == held


def test_dense_adam_holds_eight_bytes_per_parameter() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((64, 48), jnp.float32)}
    tx = optax.chain(onebit_jax.mean_gradients(AXIS), optax.scale_by_adam())
    held = state.bytes_on_a_device(tx, shapes, make_mesh(2))
    # And a few counters.
    assert 8 * 64 * 48 < held <= 8 * 64 * 48 + 32


# The GPU benchmark on CPU.


def test_measure_gives_finite_figures():
    figures = gpu.measure(gpu.Options(elements=2**10, rounds=2, calls=2))
    assert list(figures) == ["copy", "encode", "decode", "Adam"]
    for figure in figures.values():
        assert len(figure["seconds"]) == 2
        numbers = [*figure["seconds"], *(x for x in figure.values() if not isinstance(x, list))]
        assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert figures["copy"]["of copy"] == 1


def test_bytes_are_each_argument_and_result_once():
    size = {name: x.bytes / 2**16 for name, x in gpu.timed_programs((2**8, 2**8)).items()}
    # encode: z, c, bits of what is active; c and signs out. decode: parameters twice, reciprocal
    # root, bits. Adam: g once; parameters, m and v twice.
    expected = {"copy": 8, "encode": 12.25, "decode": 12.125, "Adam": 28}
    assert size == pytest.approx(expected, rel=2e-3)


def test_encode_compensates_and_packs_signs():
    z, c = np.random.default_rng(0).normal(size=(2, 16, 13)).astype(np.float32)
    active = np.full((1, 2, 13), 255, np.uint8)
    encode = jax.jit(gpu.encode)
    compensated, scale, packed = encode(z, c[None], np.full(1, 0.5, np.float32), active)
    expected = z + c - np.where(c >= 0, 0.5, -0.5)
    np.testing.assert_allclose(compensated[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scale, np.sqrt(np.mean(expected**2)), rtol=1e-5)
    signs = unpack_flags(packed, axis=1).reshape(16, 13)
    np.testing.assert_array_equal(signs, expected >= 0)


def test_decode_applies_what_was_sent():
    sent = jnp.where(jnp.arange(40).reshape(8, 5) % 2 == 0, 2.0, -2.0)
    packed = pack_flags(sent.reshape(1, 8, 1, 5) >= 0, axis=1)
    params = gpu.decode(jnp.zeros((8, 5)), packed, jnp.full((1,), 2.0), jnp.full((8, 5), 3.0))
    np.testing.assert_allclose(params, -1e-4 * 3 * sent, rtol=1e-6)
