"""Every optimizer that the programs here can train with, by name.

The library's are those of its registry; dense ones and variants are lines below.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from onebit_jax.transforms import registry
from onebit_jax.transforms.registry import REGISTRY, Entry, Setting


def dense(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Entry:
    """One of Optax's, on gradients averaged at full precision."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(onebit_jax.mean_gradients(setting.axis_name), make(setting))

    return Entry(label, learning_rate, chained)


def _adamw(setting: Setting) -> optax.GradientTransformation:
    return setting.call(optax.adamw)


def _adamw_in_bfloat16(setting: Setting) -> optax.GradientTransformation:
    """AdamW on gradients that were averaged in bfloat16."""

    def cast(dtype: Any) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, _: optax.tree.cast(updates, dtype))

    mean = onebit_jax.mean_gradients(setting.axis_name)
    return optax.chain(cast(jnp.bfloat16), mean, cast(jnp.float32), _adamw(setting))


def _lion(setting: Setting) -> optax.GradientTransformation:
    # Its momentum lasts ten times as long as its vote looks back: b2 is its own.
    return setting.call(optax.lion, b2=0.99)


def _onebit_matrices(setting: Setting) -> optax.GradientTransformation:
    """1-bit Adam on the tensors that are decayed, and on the others, norms and biases, AdamW."""

    def parts(params: Any) -> Any:
        return jax.tree.map(lambda decayed: "matrices" if decayed else "rest", setting.mask(params))

    rest = optax.chain(onebit_jax.mean_gradients(setting.axis_name), _adamw(setting))
    matrices = setting.call(onebit_jax.onebit_adam)
    return optax.partition({"matrices": matrices, "rest": rest}, parts)


def _frozen(label: str, bits: int) -> Entry:
    """1-bit Adam whose variance is never refreshed, with so many bits in the warm-up."""
    own = {"warmup_bits": bits, "variance_refreshes": None}
    return registry.warming_up(f"1-bit Adam, {label}", 2e-3, onebit_jax.onebit_adam, **own)


def _local(bits: int) -> Entry:
    plural = "bit" if bits == 1 else "bits"
    return registry.local(f"Local steps, {bits} {plural}", bits)._replace(rate_of="local_steps")


def _streaming(bits: int) -> Entry:
    """In every update a group of tensors is exchanged, beside the gradients of the next one."""
    label, fragments = f"Local steps, {bits} bits, streaming", registry.LOCAL_STEPS
    made = registry.local(label, bits, fragments=fragments, delay=1)
    return made._replace(rate_of="local_steps")


_DENSE_AND_VARIANTS: dict[str, Entry] = {
    "adam": dense("Adam", 2e-3, _adamw),
    "adam_bfloat16": Entry("Adam, gradients in bfloat16", 2e-3, _adamw_in_bfloat16, rate_of="adam"),
    "lamb": dense("LAMB", 1e-2, lambda setting: setting.call(optax.lamb)),
    "sgd": dense("SGD", 0.4, registry.sgd),
    "lion": dense("Lion", 3e-4, _lion),
    "muon": registry.muon("Muon", 32, 32)._replace(first_phase="warmup"),
    "onebit_adam_frozen": _frozen("dense warm-up, frozen variance", 32),
    **{
        f"onebit_adam_{bits}": _frozen(f"warm-up at {bits} bits, frozen variance", bits)._replace(
            rate_of="onebit_adam_frozen"
        )
        for bits in (8, 4)
    },
    "onebit_adam_published": registry.warming_up(
        "1-bit Adam, as published", 2e-3, onebit_jax.onebit_adam_published
    ),
    "onebit_adam_matrices": REGISTRY["onebit_adam"]._replace(
        label="1-bit Adam, norms and biases dense", make=_onebit_matrices
    ),
    "zero_one_adam_published": registry.zero_one(
        "0/1 Adam, published refreshes", 1.25e-4, var_update_scaler=16
    ),
    **{
        f"birder_{b}": registry.made_by(
            f"Birder, decay {b}", 1.2e-3, onebit_jax.birder, b=b, seed=0
        )._replace(feedback=False)
        for b in (0.9, 0.98)
    },
    "onebit_muon_2": registry.muon("Muon, 2 bits", 2, 8)._replace(rate_of="muon"),
    "onebit_muon_1": registry.muon("1-bit Muon", 1, 2)._replace(rate_of="muon"),
    "onebit_muon_1_delayed": registry.muon("1-bit Muon, delay 1", 1, 2, delay=1)._replace(
        rate_of="muon"
    ),
    "onebit_muon_delayed": registry.muon("Muon, 4 bits, delay 1", 4, 8, delay=1)._replace(
        rate_of="muon"
    ),
    **{f"local_steps_{bits}": _local(bits) for bits in (4, 2, 1)},
    "local_steps_4_streaming": _streaming(4),
    "compressed_mean_adam": registry.on_compressed_mean("Adam, compressed mean", 2e-3, _adamw),
    "compressed_mean_lion": registry.on_compressed_mean("Lion, compressed mean", 3e-4, _lion),
}
# Dense ones come first, as in tables.
# Benchmarks add variants of their own, which the library's registry is not to have.
OPTIMIZERS = collections.ChainMap({}, REGISTRY, _DENSE_AND_VARIANTS)
