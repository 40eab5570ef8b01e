"""What parts 1-bit Adam from Adam in fine-tuning: the frozen variance, the bits or the warm-up.

    python -m benchmarks.finetuning_parts --data GLUE --tasks mrpc --seeds 0 1 2 3 4 --warmup 0.15
    python -m train.glue --help                                          # has the other options

Adam; Adam whose variance freezes when the warm-up ends, which sends float32; one bit with the same
variance; with one that is refreshed in every update, so that only the bits are left; with the
default's refreshes, and with those after half of the steps. The last two rows are Adam and 1-bit
Adam with learning rates that fall from the classifier to the embeddings, 0.9 times each layer's for
the layer below it, as is usual in fine-tuning.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from train import registry
from train.registry import Entry, Setting
from train.glue import __main__ as glue
from train.optimizers import OPTIMIZERS, dense

LAYER_DECAY = 0.9


class FrozenAdamState(NamedTuple):
    """State of :func:`scale_by_frozen_adam`, equal on all workers.

    Attributes:
        count: updates made; int32 ``[]``.
        m: the momentum, like the parameters.
        v: the variance, which no longer changes after the warm-up.
    """

    count: jax.Array
    m: Any
    v: Any


def scale_by_frozen_adam(
    b1: float, b2: float, eps: float, warmup: int
) -> optax.GradientTransformation:
    """1-bit Adam without its bits: Adam, whose variance keeps its value after the warm-up.

    Elements whose variance is 0 then are no longer updated.
    """

    def init(params: Any) -> FrozenAdamState:
        like = optax.tree.zeros_like(params)
        return FrozenAdamState(jnp.int32(0), like, like)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FrozenAdamState]:
        del params
        after, t = state.count >= warmup, state.count + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, updates)
        v = jax.tree.map(
            lambda v, g: jnp.where(after, v, b2 * v + (1 - b2) * g**2), state.v, updates
        )
        of_m, of_v = 1 - b1**t, 1 - b2 ** jnp.minimum(t, warmup)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(after & (v == 0), 0.0, m / of_m / (jnp.sqrt(v / of_v) + eps))

        return jax.tree.map(direction, m, v), FrozenAdamState(t, m, v)

    return optax.GradientTransformation(init, update)


def _frozen_adam(setting: Setting) -> optax.GradientTransformation:
    assert isinstance(setting.warmup, int)
    return optax.chain(
        scale_by_frozen_adam(setting.b1, setting.b2, setting.eps, setting.warmup),
        optax.add_decayed_weights(setting.weight_decay, setting.mask),
        optax.scale_by_learning_rate(setting.learning_rate),
    )


def layer_rates(params: Any) -> Any:
    """Each tensor's factor of the learning rate, a tree like the parameters.

    1 above the layers, ``LAYER_DECAY`` to the power of the layers above it in them, and below.
    """
    layers = len(params["layers"])

    def rate(path: Any, _: jax.Array) -> float:
        first = path[0].key
        if first == "embeddings":
            return LAYER_DECAY**layers
        return LAYER_DECAY ** (layers - 1 - path[1].key) if first == "layers" else 1.0

    return jax.tree_util.tree_map_with_path(rate, params)


def by_layer(entry: Entry) -> Entry:
    """The same optimizer with :func:`layer_rates`."""

    def scaled(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, rate: rate * u, updates, layer_rates(params))

    def make(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(entry.make(setting), optax.stateless(scaled))

    return entry._replace(label=f"{entry.label}, a rate for each layer", make=make)


def after_half(entry: Entry) -> Entry:
    """The same optimizer with a warm-up of half of the steps."""

    def make(setting: Setting) -> optax.GradientTransformation:
        return entry.make(dataclasses.replace(setting, warmup=setting.steps // 2))

    return entry._replace(label=f"{entry.label}, warm-up of half the run", make=make)


VARIANTS: dict[str, Entry] = {
    "adam_frozen": dense("Adam, variance frozen", 2e-3, _frozen_adam)._replace(
        freezes_by_number=True
    ),
    "onebit_adam_live": registry.warming_up(
        "1-bit Adam, variance refreshed in every step",
        2e-3,
        onebit_jax.onebit_adam,
        variance_refreshes=1,
    ),
    "onebit_adam_half": after_half(OPTIMIZERS["onebit_adam"]),
    "adam_by_layer": by_layer(OPTIMIZERS["adam"]),
    "onebit_adam_by_layer": by_layer(OPTIMIZERS["onebit_adam"]),
}
ROWS = (
    *("adam", "adam_frozen", "onebit_adam_4", "onebit_adam_live", "onebit_adam"),
    *("onebit_adam_half", "adam_by_layer", "onebit_adam_by_layer"),
)


def main(arguments: Sequence[str]) -> int:
    """Runs the fine-tunings and returns the exit code."""
    OPTIMIZERS.update(VARIANTS)
    return glue.main(["--optimizers", *ROWS, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
