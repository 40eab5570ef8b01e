"""Every optimizer that the programs here can train with, by name; a new one is a line below."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.step_sets import published_variance_steps

# Updates from one exchange to the next of the optimizers that take local steps.
LOCAL_STEPS = 16


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
            of dense ones that the warm-up has, and the number of updates of the run. An optimizer
            that averages gradients at full precision is in "warmup" all the time.
        warms_up: whether all updates are dense until the variance is frozen, and compressed after
            it.
        local_steps: whether the workers' parameters differ between exchanges; its state then has
            `synced_parameters`.
        rate_of: the optimizer whose best learning rate it takes, where it is a variant of one.
        freezes_by_number: whether its variance freezes after a number of updates only.
    """

    label: str
    learning_rate: float
    make: Callable[[Setting], optax.GradientTransformation]
    phase_of: Callable[[int, int, int], Phase]
    warms_up: bool = False
    local_steps: bool = False
    rate_of: str | None = None
    freezes_by_number: bool = False


def dense(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One of Optax's, on gradients averaged at full precision."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(onebit_jax.mean_gradients(setting.axis_name), make(setting))

    return Optimizer(label, learning_rate, chained, lambda *_: "warmup")


def onebit(
    label: str,
    learning_rate: float,
    make: Callable[[Setting], Any],
    refreshes: Callable[[int], bool] = lambda step: False,
) -> Optimizer:
    """One that begins densely and compresses once its variance is frozen, but for refreshes."""

    def phase_of(step: int, warmup: int, _: int) -> Phase:
        if step < warmup:
            return "warmup"
        return "refresh" if refreshes(step) else "compression"

    return Optimizer(label, learning_rate, make, phase_of, warms_up=True)


def compressed(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One that compresses from the first update on."""
    return Optimizer(label, learning_rate, make, lambda *_: "compression")


def compressed_mean(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One of Optax's, on gradients averaged with one bit per element."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(onebit_jax.compressed_mean(setting.axis_name), make(setting))

    return compressed(label, learning_rate, chained)


def local(
    label: str, bits: int, every: int = LOCAL_STEPS, *, error_decay: float = 1.0
) -> Optimizer:
    """AdamW on every worker for itself; averages at so many bits every few steps."""

    def make(setting: Setting) -> optax.GradientTransformation:
        return onebit_jax.local_steps(
            _adamw(setting),
            optax.sgd(1.0),
            every=every,
            axis_name=setting.axis_name,
            bits=bits,
            error_decay=error_decay,
        )

    def phase_of(step: int, *_: int) -> Phase:
        return "local" if (step + 1) % every else "sync"

    return Optimizer(label, 2e-3, make, phase_of, local_steps=True)


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


def _sgd(setting: Setting) -> optax.GradientTransformation:
    """As `optax.sgd` with momentum, and decoupled weight decay."""
    return optax.chain(
        optax.trace(setting.b1),
        optax.add_decayed_weights(setting.weight_decay, setting.mask),
        optax.scale_by_learning_rate(setting.learning_rate),
    )


def _adamw(setting: Setting) -> optax.GradientTransformation:
    return optax.adamw(**_adam_options(setting))


def _adamw_in_bfloat16(setting: Setting) -> optax.GradientTransformation:
    """AdamW on gradients that were averaged in bfloat16."""

    def cast(dtype: Any) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, _: optax.tree.cast(updates, dtype))

    mean = onebit_jax.mean_gradients(setting.axis_name)
    return optax.chain(cast(jnp.bfloat16), mean, cast(jnp.float32), _adamw(setting))


def _lion(setting: Setting) -> optax.GradientTransformation:
    # Its momentum lasts ten times as long as its vote looks back: b2 is its own.
    return optax.lion(**_decay_options(setting), b1=setting.b1)


def _muon(bits: int, adam_bits: int) -> Callable[[Setting], optax.GradientTransformation]:
    """Muon on matrices, Adam at the same learning rate on embeddings, norms and biases."""

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: p.ndim == 2 and path[-1].key != "embedding", params
        )

    return lambda setting: onebit_jax.onebit_muon(
        setting.learning_rate,
        weight_decay=setting.weight_decay,
        axis_name=setting.axis_name,
        bits=bits,
        matrices=matrices,
        adam_b1=setting.b1,
        adam_b2=setting.b2,
        adam_bits=adam_bits,
        # Steps about as long as AdamW's.
        consistent_rms=0.2,
    )


def _onebit_matrices(setting: Setting) -> optax.GradientTransformation:
    """1-bit Adam on the tensors that are decayed, and on the others, norms and biases, AdamW."""

    def parts(params: Any) -> Any:
        return jax.tree.map(lambda decayed: "matrices" if decayed else "rest", setting.mask(params))

    rest = optax.chain(onebit_jax.mean_gradients(setting.axis_name), _adamw(setting))
    matrices = onebit_jax.onebit_adam(**_onebit_options(setting))
    return optax.partition({"matrices": matrices, "rest": rest}, parts)


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

    def phase_of(step: int, warmup: int, count: int) -> Phase:
        return onebit_jax.zero_one_adam_phase(step, **steps(warmup, count))

    return Optimizer(label, learning_rate, make, phase_of, local_steps=True, freezes_by_number=True)


def _birder(label: str, b: float) -> Optimizer:
    return Optimizer(
        label,
        1.2e-3,
        lambda s: onebit_jax.birder(**_decay_options(s), b=b, seed=0, axis_name=s.axis_name),
        # In the first update workers also tell each other where they have gradients.
        lambda step, *_: "compression" if step else "warmup",
    )


# After the freeze, gaps that grow with the number of updates made: a 32nd to a 16th of it.
REFRESHES = published_variance_steps(16)

OPTIMIZERS: dict[str, Optimizer] = {
    "adam": dense("Adam", 2e-3, _adamw),
    "adam_bfloat16": Optimizer(
        "Adam, gradients in bfloat16",
        2e-3,
        _adamw_in_bfloat16,
        lambda *_: "warmup",
        rate_of="adam",
    ),
    "lamb": dense("LAMB", 1e-2, lambda s: optax.lamb(**_adam_options(s))),
    "sgd": dense("SGD", 0.4, _sgd),
    "lion": dense("Lion", 3e-4, _lion),
    "muon": Optimizer("Muon", 8e-3, _muon(32, 32), lambda *_: "warmup"),
    "onebit_adam": onebit(
        "1-bit Adam", 2e-3, lambda s: onebit_jax.onebit_adam(**_onebit_options(s))
    ),
    "onebit_adam_8": onebit(
        "1-bit Adam, warm-up at 8 bits",
        2e-3,
        lambda s: onebit_jax.onebit_adam(**_onebit_options(s), warmup_bits=8),
    )._replace(rate_of="onebit_adam"),
    "onebit_adam_4": onebit(
        "1-bit Adam, warm-up at 4 bits",
        2e-3,
        lambda s: onebit_jax.onebit_adam(**_onebit_options(s), warmup_bits=4),
    )._replace(rate_of="onebit_adam"),
    "onebit_adam_refresh": onebit(
        "1-bit Adam, warm-up at 8 bits, refreshes",
        2e-3,
        lambda s: onebit_jax.onebit_adam(
            **_onebit_options(s), warmup_bits=8, variance_refreshes=REFRESHES
        ),
        REFRESHES,
    )._replace(rate_of="onebit_adam"),
    "onebit_adam_matrices": onebit("1-bit Adam, norms and biases dense", 2e-3, _onebit_matrices),
    "onebit_lamb": onebit(
        "1-bit LAMB", 1e-2, lambda s: onebit_jax.onebit_lamb(**_onebit_options(s))
    ),
    # Its variance begins at 0 and is not corrected for that, so that steps are larger than Adam's
    # at the same learning rate: the more so, the fewer refreshes there are.
    "zero_one_adam": _zero_one("0/1 Adam", 5e-4),
    "zero_one_adam_published": _zero_one(
        "0/1 Adam, published refreshes", 1.25e-4, var_update_scaler=16
    ),
    "birder": _birder("Birder", b=0.95),
    "birder_0.9": _birder("Birder, decay 0.9", b=0.9),
    "birder_0.98": _birder("Birder, decay 0.98", b=0.98),
    "signum": compressed("Signum", 3e-4, lambda s: onebit_jax.signum(**_sign_options(s))),
    "distributed_lion": compressed(
        "Distributed Lion", 3e-4, lambda s: onebit_jax.distributed_lion(**_sign_options(s))
    ),
    "ef_signsgd": compressed(
        "EF sign SGD",
        0.4,
        lambda s: onebit_jax.ef_signsgd(**_decay_options(s), momentum=s.b1, axis_name=s.axis_name),
    ),
    "onebit_muon": compressed("1-bit Muon", 8e-3, _muon(1, 2))._replace(rate_of="muon"),
    "onebit_muon_2": compressed("Muon, 2 bits", 8e-3, _muon(2, 8))._replace(rate_of="muon"),
    "onebit_muon_4": compressed("Muon, 4 bits", 8e-3, _muon(4, 8))._replace(rate_of="muon"),
    "local_steps": local("Local steps, float32", 32),
    "local_steps_4": local("Local steps, 4 bits", 4)._replace(rate_of="local_steps"),
    "local_steps_2": local("Local steps, 2 bits", 2)._replace(rate_of="local_steps"),
    "local_steps_1": local("Local steps, 1 bit", 1)._replace(rate_of="local_steps"),
    "compressed_mean_sgd": compressed_mean("SGD, compressed mean", 0.4, _sgd),
    "compressed_mean_adam": compressed_mean("Adam, compressed mean", 2e-3, _adamw),
    "compressed_mean_lion": compressed_mean("Lion, compressed mean", 3e-4, _lion),
}


def check_names(names: tuple[str, ...]) -> str | None:
    """What is wrong with a choice of optimizers, or None."""
    if names and len(names) == len(set(names)) and OPTIMIZERS.keys() >= set(names):
        return None
    return f"one or more, each once, of {', '.join(OPTIMIZERS)}"


def check_warmup(warmup: int | Literal["auto"], names: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a warm-up is one that these optimizers have, and what it must be."""
    if warmup != "auto":
        return 1 <= warmup < 2**31, "a whole number of at least 1, or auto; below 2**31"
    by_number = [x for x in names if x in OPTIMIZERS and OPTIMIZERS[x].freezes_by_number]
    return not by_number, f"a whole number of at least 1 with {', '.join(by_number)}"


def warmup_end(
    warmup: int | Literal["auto"], schedule_warmup: int
) -> int | onebit_jax.VarianceStable:
    """When warm-up ends; by itself it does not before the learning rate has risen."""
    return onebit_jax.variance_stable(min_steps=schedule_warmup) if warmup == "auto" else warmup
