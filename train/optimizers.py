"""Every optimizer that the programs here can train with, by name; a new one is a line below."""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

import onebit_jax

# What the metric "phase" of a training step stands for; an optimizer may have others besides.
PHASES = ("dense", "compressed")


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the optimizers of a run have in common, each as far as it has such a thing.

    Attributes:
        learning_rate: a function of the number of updates made.
        axis_name: the axis that the workers run along.
        steps: number of updates of the run.
        mask: a function of the parameters that says which tensors are decayed; norms and biases
            are not.
        warmup: when the optimizers with a dense warm-up end it.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the variance's root.
        weight_decay: decoupled weight decay.
    """

    learning_rate: optax.Schedule
    axis_name: str
    steps: int
    mask: Callable[[Any], Any]
    warmup: int | onebit_jax.VarianceStable
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class Optimizer(NamedTuple):
    """An optimizer as programs need it.

    Attributes:
        label: its name in tables and pictures.
        learning_rate: the peak that a sweep begins from.
        make: the transformation for a setting; a `ValueError` names what is out of range.
        phase_of: the phase of an update, from the number of updates made before it, the number
            of dense ones that the warm-up has, and the number of updates of the run.
        static: for every phase the `phase` that `update` is given, so that it compiles that phase
            alone; None where it has no such argument.
        local_steps: whether the workers' parameters differ between exchanges; its state then has
            `synced_parameters`.
    """

    label: str
    learning_rate: float
    make: Callable[[Setting], optax.GradientTransformation]
    phase_of: Callable[[int, int, int], str]
    static: Mapping[str, Any]
    local_steps: bool = False

    @property
    def warms_up(self) -> bool:
        """Whether all updates are dense until the variance is frozen, and compressed after it."""
        return tuple(self.static) == PHASES


def dense(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One of Optax's, on gradients averaged at full precision."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(onebit_jax.mean_gradients(setting.axis_name), make(setting))

    return Optimizer(label, learning_rate, chained, lambda *_: "dense", {"dense": None})


def onebit(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One that begins densely and compresses once its variance is frozen."""
    return Optimizer(
        label,
        learning_rate,
        make,
        lambda step, warmup, _: "dense" if step < warmup else "compressed",
        {"dense": "warmup", "compressed": "compression"},
    )


def compressed(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One that compresses from the first update on."""
    return Optimizer(label, learning_rate, make, lambda *_: "compressed", {"compressed": None})


def _decay_options(setting: Setting) -> dict[str, Any]:
    return {
        "learning_rate": setting.learning_rate,
        "weight_decay": setting.weight_decay,
        "mask": setting.mask,
    }


def _adam_options(setting: Setting) -> dict[str, Any]:
    betas = {"b1": setting.b1, "b2": setting.b2, "eps": setting.eps}
    return _decay_options(setting) | betas


def _onebit_options(setting: Setting) -> dict[str, Any]:
    return _adam_options(setting) | {"warmup": setting.warmup, "axis_name": setting.axis_name}


def _sign_options(setting: Setting) -> dict[str, Any]:
    return _decay_options(setting) | {"b1": setting.b1, "axis_name": setting.axis_name}


def _norms_and_biases(setting: Setting) -> Callable[[Any], Any]:
    """The tensors that are not decayed."""
    return lambda params: jax.tree.map(operator.not_, setting.mask(params))


def _zero_one(label: str, learning_rate: float, **policy: int) -> Optimizer:
    """0/1 Adam; gaps between syncs double as early in a run as in the paper's."""

    def steps(warmup: Any, steps: int) -> dict[str, Any]:
        # There every 32,768 of 152,000 updates.
        doubling = {"local_step_scaler": max(1, round(steps * 32768 / 152000))}
        # Refreshed in every update until it freezes.
        always = {"var_update_scaler": warmup}
        return {"variance_freeze": warmup} | doubling | always | policy

    def make(setting: Setting) -> optax.GradientTransformation:
        return onebit_jax.zero_one_adam(
            **_adam_options(setting),
            **steps(setting.warmup, setting.steps),
            axis_name=setting.axis_name,
        )

    def phase_of(step: int, warmup: int, count: int) -> str:
        phase = onebit_jax.zero_one_adam_phase(step, **steps(warmup, count))
        return {"variance": "dense", "compression": "compressed"}.get(phase, phase)

    static = {"dense": "variance", "compressed": "compression", "local": "local", "sync": "sync"}
    return Optimizer(label, learning_rate, make, phase_of, static, local_steps=True)


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": dense("Adam", 2e-3, lambda s: optax.adamw(**_adam_options(s))),
    "lamb": dense("LAMB", 1e-2, lambda s: optax.lamb(**_adam_options(s))),
    # Corrected, its warm-up is AdamW.
    "onebit_adam": onebit(
        "1-bit Adam",
        2e-3,
        lambda s: onebit_jax.onebit_adam(**_onebit_options(s), bias_correction=True),
    ),
    "onebit_adam_dense": onebit(
        "1-bit Adam, norms and biases dense",
        2e-3,
        lambda s: onebit_jax.onebit_adam(
            **_onebit_options(s), bias_correction=True, dense=_norms_and_biases(s)
        ),
    ),
    "onebit_lamb": onebit(
        "1-bit LAMB", 1e-2, lambda s: onebit_jax.onebit_lamb(**_onebit_options(s))
    ),
    # Its variance begins at 0 and is not corrected for that, so that steps are larger than Adam's
    # at the same learning rate: the more so, the fewer refreshes there are.
    "zero_one_adam": _zero_one("0/1 Adam", 5e-4),
    "zero_one_adam_published": _zero_one(
        "0/1 Adam, published refreshes", 1.25e-4, var_update_scaler=16
    ),
    "birder": Optimizer(
        "Birder",
        1.2e-3,
        lambda s: onebit_jax.birder(**_decay_options(s), seed=0, axis_name=s.axis_name),
        # In the first update workers also tell each other where they have gradients.
        lambda step, *_: "compressed" if step else "first",
        {"first": "warmup", "compressed": "compression"},
    ),
    "signum": compressed("Signum", 3e-4, lambda s: onebit_jax.signum(**_sign_options(s))),
    # Its momentum lasts ten times as long as its vote looks back: b2 is its own.
    "lion": dense("Lion", 3e-4, lambda s: optax.lion(**_decay_options(s), b1=s.b1)),
    "distributed_lion": compressed(
        "Distributed Lion", 3e-4, lambda s: onebit_jax.distributed_lion(**_sign_options(s))
    ),
    "ef_signsgd": compressed(
        "EF sign SGD",
        0.4,
        lambda s: onebit_jax.ef_signsgd(**_decay_options(s), momentum=s.b1, axis_name=s.axis_name),
    ),
}


def check_names(names: tuple[str, ...]) -> str | None:
    """What is wrong with a choice of optimizers, or None."""
    if names and len(names) == len(set(names)) and OPTIMIZERS.keys() >= set(names):
        return None
    return f"one or more, each once, of {', '.join(OPTIMIZERS)}"
