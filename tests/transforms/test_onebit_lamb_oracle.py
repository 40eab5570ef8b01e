"""1-bit LAMB against DeepSpeed's recorded trajectories."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import row_padding
from tests.oracle import Recording
from tests.workers import (
    AXIS,
    BINDINGS,
    lamb_parts,
    lamb_state,
    on_workers,
    replicate,
)

TOLERANCE = 5e-6  # relative to each tensor's largest value


def assert_close(ours, theirs, what):
    ours = np.asarray(ours).reshape(theirs.shape)
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error <= TOLERANCE, f"{what}: off by {error:.1e} of its largest value"


def optimizer(recording):
    options = recording.hyperparameters["kw"]
    return onebit_jax.onebit_lamb(
        lambda t: jnp.asarray(recording.learning_rates, jnp.float32)[t],
        b1=options["betas"][0],
        b2=options["betas"][1],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        warmup=options["freeze_step"] - 1,
        min_coeff=options["min_coeff"],
        max_coeff=options["max_coeff"],
        axis_name=AXIS,
    )


def updates(recording, workers, binding, widen=lambda x: x):
    """Each update's number, then parameters and state after it; leaves in the file's order.

    `widen` makes of the recorded parameters and gradients those that the optimizer sees.
    """
    tx = optimizer(recording)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_workers(step, workers, binding)
    params = replicate([widen(recording.initial[name]) for name in recording.names], workers)
    state = on_workers(tx.init, workers, binding)(params)
    gradients = recording.tree("g")
    for t in range(len(recording.learning_rates)):
        grads = [
            jnp.stack([jnp.asarray(widen(own)) for own in gradients[name][t]])
            for name in recording.names
        ]
        params, state = step(params, state, [replicate_to(workers, g) for g in grads])
        yield t, cast(Any, params), lamb_state(state)


def replicate_to(workers, g):
    """One worker's gradients for all workers, or each worker's own."""
    return jnp.broadcast_to(g, (workers, *g.shape[1:]))


def assert_follows(recording, t, state, narrow=lambda x: x):
    """Coefficients, momentum and fresh variance after update `t`.

    `narrow` undoes what `widen` did to a tensor.
    """
    warmup = recording.hyperparameters["kw"]["freeze_step"] - 1
    recorded = {"c~": "lamb_coeff_freeze", "ratios": "last_factor"}
    ours = {"c~": state.coefficients, "ratios": state.ratios}
    if t >= warmup:
        recorded["momentum scales"], ours["momentum scales"] = (
            "scaling_coeff",
            state.momentum_scales,
        )
        assert int(state.frozen_at[0]) == warmup
    for what, kind in recorded.items():
        assert_close(ours[what][0], recording.array(kind)[t, 0], f"{what}, update {t}")
    if t < warmup:
        return
    parts, k, start = lamb_parts(state), np.asarray(state.momentum_scales[0]), 0
    for i, (name, inverse_root) in enumerate(
        zip(recording.names, state.v_then_inverse_root, strict=True)
    ):
        end = start + inverse_root[0].size
        m = narrow((parts.F[0, start:end] / k[i]).reshape(inverse_root[0].shape))
        fresh = narrow((parts.fresh[0, start:end] / k[i] ** 2).reshape(inverse_root[0].shape))
        assert_close(m, recording.tree("m")[name][t, 0], f"momentum {name}, update {t}")
        expected = recording.tree("vfresh")[name][t, 0]
        assert_close(fresh, expected, f"fresh variance {name}, update {t}")
        start = end


@pytest.mark.parametrize("binding", BINDINGS)
def test_follows_deepspeed_at_every_call(shared_dir, binding):
    recording = Recording(shared_dir / "oracle" / "lamb_w2_wd0.01.npz")
    for t, params, state in updates(recording, 2, binding):
        for i, name in enumerate(recording.names):
            assert_close(params[i], recording.tree("p")[name][t], f"parameter {name}, update {t}")
        assert_follows(recording, t, state)
        if int(state.count[0]) > int(state.frozen_at[0]) >= 0:
            parts = lamb_parts(state)
            assert_close(parts.e, recording.array("we")[t], f"worker residual, update {t}")
            assert_close(parts.E, recording.array("se")[t], f"server residual, update {t}")


def exact_exchange(values, feedback, live, blocks, *, axis_name, scale, bucket_bytes):
    """In place of EC1: the means as they are, of blocks with one live element in each chunk.

    Such a chunk's sign and scale are its mean, so that what is received says it exactly.
    """
    [z], [c], [counted], [block] = values, feedback.compensated, live, blocks
    assert block.chunk_bytes == 1
    alive = jnp.unpackbits(counted.bits.reshape(-1, 1), axis=1, bitorder="little") > 0
    mean = jnp.where(
        alive, lax.pmean(z.reshape(alive.shape) + c.reshape(alive.shape), axis_name), 0
    )
    signs = jnp.packbits(mean >= 0, axis=1, bitorder="little")
    rows = block.join(signs, jnp.sum(jnp.abs(mean), axis=1))
    received = jnp.pad(rows, ((0, 0), (0, row_padding(blocks))))
    nothing = jnp.zeros_like(c)
    return ec1.Feedback([nothing], feedback.scales, feedback.served, received)


def test_without_compression_it_follows_deepspeeds_arithmetic(shared_dir, monkeypatch):
    """With one worker DeepSpeed does not compress, and the exchange is replaced by an exact one.

    What is received are signs and scales, a scale for each worker's chunk. So there are as many
    workers as elements, all with the recorded gradient, and before each element stand seven whose
    gradient is always zero: dead ones, which must change nothing.
    """
    monkeypatch.setattr(ec1, "all_reduce", exact_exchange)
    recording = Recording(shared_dir / "oracle" / "lamb_w1_wd0.01.npz")

    def widen(x):
        return np.pad(np.reshape(x, (-1, 1)), ((0, 0), (7, 0)))

    def narrow(x):
        return x[:, 7]

    workers = sum(x.size for x in recording.initial.values())
    for t, params, state in updates(recording, workers, "vmap", widen):
        for i, name in enumerate(recording.names):
            ours = np.asarray(params[i])
            np.testing.assert_array_equal(ours, np.broadcast_to(ours[:1], ours.shape))
            expected = recording.tree("p")[name][t, 0]
            assert_close(narrow(ours[0]), expected, f"parameter {name}, update {t}")
            assert not ours[0, :, :7].any()
        assert_follows(recording, t, state, narrow)
