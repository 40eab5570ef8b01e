"""1-bit Adam, plain: what `onebit_jax.onebit_adam_published` computes, in a hundred lines.

It follows Algorithm 1 of Tang et al. (https://arxiv.org/abs/2102.02888) and keeps its names: worker
i has gradients g_i and residuals e_i, server j has residuals E_j, and every worker is the server of
one of n chunks of every tensor. `init` and `update` run on each worker, inside a function with a
mapped axis `"workers"` (`jax.vmap`, `jax.shard_map`), and are pure functions.

What the library adds: one message for all tensors instead of one for each; arrays that are written
in place; residuals that are never written out; nodes of several devices; split models; skipped
updates. `onebit_adam` adds a warm-up of 4 bits, bias correction, refreshes, and bounded steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

AXIS = "workers"


class State(NamedTuple):
    """The state of one worker; trees like the parameters."""

    count: jax.Array  # the number of updates made
    m: Any  # the momentum, equal on all workers
    v: Any  # the variance, equal on all workers; constant after warm-up
    e: Any  # this worker's residuals, of whole tensors
    E: Any  # this server's residuals, of its chunk of each tensor


def init(params: Any) -> State:
    """The state before the first update: all zeros."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    own_chunks = jax.tree.map(lambda x: chunks_of(x)[0], zeros)
    return State(jnp.zeros((), jnp.int32), zeros, zeros, zeros, own_chunks)


def update(
    grads: Any,
    state: State,
    params: Any,
    *,
    learning_rate: float = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup: int,
) -> tuple[Any, State]:
    """The parameters after an update with this worker's gradients, and the next state."""
    step = functools.partial(jax.tree.map, lambda g, m: b1 * m + (1 - b1) * g)

    def warmup_step() -> State:
        g = lax.pmean(grads, AXIS)
        v = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, g, state.v)
        return state._replace(m=step(g, state.m), v=v)

    def compression_step() -> State:
        m_i = step(grads, state.m)
        reduced = jax.tree.map(compressed_all_reduce, m_i, state.e, state.E, state.v)
        m, e, E = jax.tree.transpose(
            jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), reduced
        )
        return state._replace(m=m, e=e, E=E)

    state = lax.cond(state.count < warmup, warmup_step, compression_step)

    def new_value(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        # An element that had no gradient in warm-up is inactive: only weight decay moves it.
        direction = jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0.0)
        return p - learning_rate * (direction + weight_decay * p)

    params = jax.tree.map(new_value, params, state.m, state.v)
    return params, state._replace(count=state.count + 1)


def compressed_all_reduce(
    m_i: jax.Array, e: jax.Array, E: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of the workers' `m_i` at one bit an element, and the residuals it leaves.

    Worker:  c = m_i + e,  s = rms(c),  e <- c - s sgn(c),  and sends sgn(c) and s.
    Server:  a = mean_i(s_i sgn(c_i)) + E,  S = rms(a),  E <- a - S sgn(a),  and sends sgn(a) and S.
    """
    active = v > 0
    c = jnp.where(active, m_i + e, 0.0)
    s = rms(c, active)
    e = jnp.where(active, c - s * sgn(c), 0.0)

    # First shot: chunk j of everybody's signs goes to server j, one bit an element.
    bits = lax.all_to_all(pack(chunks_of(c)), AXIS, split_axis=0, concat_axis=0, tiled=True)
    scales = lax.all_gather(s, AXIS)
    active_chunk = chunks_of(active)[lax.axis_index(AXIS)]
    a = jnp.where(active_chunk, jnp.mean(scales[:, None] * unpack(bits), 0) + E, 0.0)
    S = rms(a, active_chunk)
    E = jnp.where(active_chunk, a - S * sgn(a), 0.0)

    # Second shot: each server's answer goes to all.
    bits, scales = lax.all_gather((pack(a), S), AXIS)
    mean = (scales[:, None] * unpack(bits)).reshape(-1)[: c.size].reshape(c.shape)
    return jnp.where(active, mean, 0.0), e, E


def sgn(x: jax.Array) -> jax.Array:
    """The sign that a bit stands for: 1 for zeros too."""
    return jnp.where(x >= 0, 1.0, -1.0)


def rms(x: jax.Array, active: jax.Array) -> jax.Array:
    """The root mean square over active elements; inactive ones of `x` are 0."""
    return jnp.sqrt(jnp.sum(x * x) / jnp.maximum(jnp.sum(active), 1))


def chunks_of(x: jax.Array) -> jax.Array:
    """A tensor as `[n, elements]`, padded so that each chunk packs into whole bytes."""
    n = lax.axis_size(AXIS)
    return jnp.pad(x.reshape(-1), (0, -x.size % (8 * n))).reshape(n, -1)


def pack(x: jax.Array) -> jax.Array:
    """The signs of float32 `[..., k]`, as uint8 `[..., k / 8]`."""
    return jnp.packbits(x >= 0, axis=-1)


def unpack(bits: jax.Array) -> jax.Array:
    """1 and -1 from uint8 `[..., k / 8]`, as float32 `[..., k]`."""
    return 2.0 * jnp.unpackbits(bits, axis=-1) - 1.0
