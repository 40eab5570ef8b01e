"""Learning rates over a run: a linear warm-up, then exponential decay, a cosine, or a line to 0."""

import jax
import jax.numpy as jnp
import optax


def exponential(peak: float, *, warmup: int, rate: float, every: int) -> optax.Schedule:
    """Linear warm-up to `peak`, then times `rate` after every `every` steps, in stairs.

    The 1-bit Adam paper's BERT schedule is `peak=4e-4, warmup=12500, rate=0.99, every=520`.
    """
    decay = optax.exponential_decay(peak, every, rate, staircase=True)
    return _after_linear_warmup(peak, warmup, decay)


def cosine(peak: float, *, warmup: int, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak`, then half a cosine down to 0 at the end of all `steps`."""
    return _after_linear_warmup(peak, warmup, optax.cosine_decay_schedule(peak, steps - warmup))


def linear(peak: float, *, warmup: int, steps: int) -> optax.Schedule:
    """Linear warm-up to `peak`, then linearly down to 0 at the end of all `steps`."""
    return _after_linear_warmup(peak, warmup, optax.linear_schedule(peak, 0.0, steps - warmup))


def _after_linear_warmup(peak: float, warmup: int, decay: optax.Schedule) -> optax.Schedule:
    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        # From peak / warmup, not from 0: an update with a learning rate of 0 would be wasted.
        rising = peak * (count + 1) / max(warmup, 1)
        return jnp.where(count < warmup, rising, decay(count - warmup))

    return schedule
