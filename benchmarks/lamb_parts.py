"""What parts 1-bit LAMB from LAMB on a language model: each of its differences, one by one.

    python -m benchmarks.lamb_parts --corpus TEXTS --workers 4 --steps 800 --out runs/lamb-parts
    python -m train.compare --help                                       # has the other options

All but the last four send float32. After the warm-up the variance freezes, or the coefficients, or
both; with both, the ratios that the paper has in place of fresh coefficients are left out or taken
from the variance itself, which an exchange of one bit can only estimate. Then come the paper's
1-bit LAMB without ratios, and as it is; 1-bit LAMB with fresh coefficients, of the compressed
momentum, beside its refreshed variance, and as it is. All have the learning rate that suits LAMB
best.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from train.registry import Entry, Setting, made_by
from train import compare
from train.optimizers import OPTIMIZERS

Coefficients = Literal["fresh", "frozen", "frozen times ratios"]


class LambState(NamedTuple):
    """State of :func:`scale_by_lamb_parts`, equal on all workers.

    Attributes:
        count: updates made; int32 ``[]``.
        m: the momentum, like the parameters.
        v: the variance, never frozen.
        v_used: that of updates; after the warm-up its last value, if it freezes.
        running: coefficients, a tree of scalars.
        ratio: the last ratios, likewise.
    """

    count: jax.Array
    m: Any
    v: Any
    v_used: Any
    running: Any
    ratio: Any


def scale_by_lamb_parts(
    setting: Setting, *, frozen_variance: bool, coefficients: Coefficients
) -> optax.GradientTransformation:
    """LAMB as 1-bit LAMB has it before it compresses; after the warm-up with parts that freeze.

    Args:
        setting: hyperparameters; its warm-up is a number.
        frozen_variance: whether updates keep the variance of the end of the warm-up.
        coefficients: of updates after it.
    """
    b1, b2, eps = setting.b1, setting.b2, setting.eps
    assert isinstance(setting.warmup, int)
    warmup = setting.warmup

    def init(params: Any) -> LambState:
        zeros, ones = (jax.tree.map(lambda _, x=x: jnp.float32(x), params) for x in (0.0, 1.0))
        like = optax.tree.zeros_like(params)
        return LambState(jnp.int32(0), like, like, like, zeros, ones)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LambState]:
        after = state.count >= warmup
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, updates)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.v, updates)
        keep = after & frozen_variance
        v_used = jax.tree.map(lambda last, now: jnp.where(keep, last, now), state.v_used, v)
        mask = setting.mask(params) if callable(setting.mask) else setting.mask

        def of_tensor(
            m: Any, v: Any, used: Any, p: Any, decays: Any, running: Any, last: Any
        ) -> tuple[jax.Array, ...]:
            rate = jnp.where(decays, setting.weight_decay, 0.0)
            q = m / (jnp.sqrt(used) + eps)
            u = q + rate * p
            norm_p, norm_u = jnp.linalg.norm(p), jnp.linalg.norm(u)
            defined = (norm_p > 0) & (norm_u > 0)
            c = jnp.clip(norm_p / jnp.where(defined, norm_u, 1), 0.01, 10.0)
            c = jnp.where(defined, c, 1.0)
            new = jnp.where(after | (c == 1), running, 0.9 * running + 0.1 * c)
            w = jnp.minimum(1.0, jnp.linalg.norm(q) / jnp.where(norm_u > 0, norm_u, 1))
            f = w * jnp.max((jnp.sqrt(used) + eps) / (jnp.sqrt(v) + eps)) + 1 - w
            r = jnp.clip(jnp.clip(f, 0.5, 4.0), 0.9 * last, 1.1 * last)
            r = jnp.where(after & (coefficients == "frozen times ratios"), r, 1.0)
            fixed = jnp.where(new > 0, new, 1.0) * r
            factor = jnp.where(after & (coefficients != "fresh"), fixed, c)
            return factor * u, new, r

        outer = jax.tree.structure(params)
        found = jax.tree.map(of_tensor, m, v, v_used, params, mask, state.running, state.ratio)
        made, running, ratio = jax.tree.transpose(outer, jax.tree.structure((0, 0, 0)), found)
        return made, LambState(state.count + 1, m, v, v_used, running, ratio)

    return optax.GradientTransformation(init, update)


def parts(
    *, frozen_variance: bool, coefficients: Coefficients
) -> Callable[[Setting], optax.GradientTransformation]:
    """LAMB on the mean gradient, with these parts frozen after the warm-up."""

    def make(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(
            onebit_jax.mean_gradients(setting.axis_name),
            scale_by_lamb_parts(
                setting, frozen_variance=frozen_variance, coefficients=coefficients
            ),
            optax.scale_by_learning_rate(setting.learning_rate),
        )

    return make


def _variant(label: str, frozen_variance: bool, coefficients: Coefficients) -> Entry:
    make = parts(frozen_variance=frozen_variance, coefficients=coefficients)
    return Entry(label, 2e-2, make, rate_of="lamb", freezes_by_number=True)


def _fresh(setting: Setting) -> optax.GradientTransformation:
    """LAMB on the direction of 1-bit Adam in place of Adam's, with a new coefficient every time."""
    return optax.chain(
        setting.call(onebit_jax.scale_by_onebit_adam),
        optax.add_decayed_weights(setting.weight_decay, setting.mask),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(setting.learning_rate),
    )


VARIANTS: dict[str, Entry] = {
    "lamb_bounded": _variant("LAMB, no bias correction", False, "fresh"),
    "lamb_c": _variant("coefficients frozen", False, "frozen"),
    "lamb_v": _variant("variance frozen", True, "fresh"),
    "lamb_v_c": _variant("both frozen", True, "frozen"),
    "lamb_v_c_r": _variant("both frozen, exact ratios", True, "frozen times ratios"),
    "onebit_lamb_no_ratios": made_by(
        "1-bit LAMB, published, no ratios",
        2e-2,
        onebit_jax.onebit_lamb_published,
        min_ratio=1.0,
        max_ratio=1.0,
    )._replace(rate_of="lamb", warms_up=True),
    "onebit_lamb_published": OPTIMIZERS["onebit_lamb_published"]._replace(rate_of="lamb"),
    "onebit_lamb_fresh": Entry(
        "1-bit LAMB, fresh coefficients",
        2e-2,
        _fresh,
        exchange=onebit_jax.scale_by_onebit_adam,
        warms_up=True,
        rate_of="lamb",
    ),
    "onebit_lamb": OPTIMIZERS["onebit_lamb"]._replace(rate_of="lamb"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and returns its exit code."""
    OPTIMIZERS.update(VARIANTS)
    return compare.main(["--task", "lm", "--optimizers", "lamb", *VARIANTS, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
