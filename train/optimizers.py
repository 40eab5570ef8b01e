"""Every optimizer that the programs here can train with, by name; a new one is a line below."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.step_sets import published_variance_steps

# Updates from one exchange to the next of the optimizers that take local steps.
LOCAL_STEPS = 16
# What the command line says of the exchange, by the names that the library's functions have.
EXCHANGE = (
    "bits",
    "warmup_bits",
    "variance_refreshes",
    "scale",
    "residual_dtype",
    "local_dtype",
    "bucket_bytes",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the optimizers of a run have in common, each as far as it has such a thing.

    Attributes:
        learning_rate: a function of the number of updates made.
        axis_name: the axis that the workers run along, or those of nodes and workers within one.
        steps: number of updates of the run.
        mask: a function of the parameters that says which tensors are decayed; norms and biases
            are not.
        warmup: when the optimizers with a dense warm-up end it.
        b1: decay of the momentum.
        b2: decay of the variance.
        eps: added to the variance's root.
        weight_decay: decoupled weight decay.
        exchange: options of the exchange, in place of an optimizer's own.
    """

    learning_rate: optax.Schedule
    axis_name: Any
    steps: int
    mask: Callable[[Any], Any]
    warmup: int | onebit_jax.VarianceStable
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    exchange: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def call(self, function: Callable[..., Any], **own: Any) -> Any:
        """Calls a function with what it takes of a setting; `own` arguments go before it.

        But options of the exchange that the command line gives go before those.
        """
        taken = inspect.signature(function).parameters
        offered = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        offered = {**offered, "momentum": self.b1, **own, **self.exchange}
        return function(**{name: value for name, value in offered.items() if name in taken})


class Optimizer(NamedTuple):
    """An optimizer as programs need it.

    Attributes:
        label: its name in tables and pictures.
        learning_rate: the peak that a sweep begins from.
        make: the transformation for a setting; a `ValueError` names what is out of range.
        first_phase: the phase of the first update. One that averages gradients at full precision is
            in "warmup" all the time.
        exchange: the function of the library that it exchanges by, whose options it has.
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
    first_phase: Phase = "warmup"
    exchange: Callable[..., Any] | None = None
    warms_up: bool = False
    local_steps: bool = False
    rate_of: str | None = None
    freezes_by_number: bool = False

    @property
    def options(self) -> set[str]:
        """The options of the exchange that it has."""
        taken = inspect.signature(self.exchange).parameters if self.exchange else {}
        return taken.keys() & EXCHANGE


def dense(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One of Optax's, on gradients averaged at full precision."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(onebit_jax.mean_gradients(setting.axis_name), make(setting))

    return Optimizer(label, learning_rate, chained)


def onebit(label: str, learning_rate: float, function: Callable[..., Any], **own: Any) -> Optimizer:
    """One that begins densely and compresses once its variance is frozen, but for refreshes."""

    def make(setting: Setting) -> optax.GradientTransformation:
        return setting.call(function, **own)

    return Optimizer(label, learning_rate, make, exchange=function, warms_up=True)


def compressed(
    label: str,
    learning_rate: float,
    make: Callable[[Setting], Any],
    exchange: Callable[..., Any] | None = None,
) -> Optimizer:
    """One that compresses from the first update on."""
    return Optimizer(label, learning_rate, make, "compression", exchange)


def compressed_mean(label: str, learning_rate: float, make: Callable[[Setting], Any]) -> Optimizer:
    """One of Optax's, on gradients averaged with one bit per element."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(setting.call(onebit_jax.compressed_mean), make(setting))

    return compressed(label, learning_rate, chained, onebit_jax.compressed_mean)


def local(
    label: str, bits: int, every: int = LOCAL_STEPS, *, error_decay: float = 1.0
) -> Optimizer:
    """AdamW on every worker for itself; averages at so many bits every few steps."""

    def make(setting: Setting) -> optax.GradientTransformation:
        own = {"inner": setting.call(optax.adamw), "outer": optax.sgd(1.0), "every": every}
        return setting.call(onebit_jax.local_steps, **own, bits=bits, error_decay=error_decay)

    return Optimizer(label, 2e-3, make, "local", onebit_jax.local_steps, local_steps=True)


def _sgd(setting: Setting) -> optax.GradientTransformation:
    """As `optax.sgd` with momentum, and decoupled weight decay."""
    return optax.chain(
        optax.trace(setting.b1),
        optax.add_decayed_weights(setting.weight_decay, setting.mask),
        optax.scale_by_learning_rate(setting.learning_rate),
    )


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


def _muon(bits: int, adam_bits: int) -> Callable[[Setting], optax.GradientTransformation]:
    """Muon on matrices, Adam at the same learning rate on embeddings, norms and biases."""

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: p.ndim == 2 and path[-1].key != "embedding", params
        )

    return lambda setting: setting.call(
        onebit_jax.onebit_muon,
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
    matrices = setting.call(onebit_jax.onebit_adam)
    return optax.partition({"matrices": matrices, "rest": rest}, parts)


def _zero_one(label: str, learning_rate: float, **policy: int) -> Optimizer:
    """0/1 Adam; gaps between syncs double as early in a run as in the paper's."""

    def make(setting: Setting) -> optax.GradientTransformation:
        # There every 32,768 of 152,000 updates.
        doubling = {"local_step_scaler": max(1, round(setting.steps * 32768 / 152000))}
        # Refreshed in every update until it freezes.
        always = {"var_update_scaler": setting.warmup}
        own = {"variance_freeze": setting.warmup} | doubling | always | policy
        return setting.call(onebit_jax.zero_one_adam, **own)

    made = Optimizer(label, learning_rate, make, exchange=onebit_jax.zero_one_adam)
    return made._replace(local_steps=True, freezes_by_number=True)


def _birder(label: str, b: float) -> Optimizer:
    # In the first update workers also tell each other where they have gradients.
    return Optimizer(
        label,
        1.2e-3,
        lambda setting: setting.call(onebit_jax.birder, b=b, seed=0),
        exchange=onebit_jax.birder,
    )


def _by(function: Callable[..., Any], **own: Any) -> Callable[[Setting], Any]:
    return lambda setting: setting.call(function, **own)


# After the freeze, gaps that grow with the number of updates made: a 32nd to a 16th of it.
REFRESHES = published_variance_steps(16)

_adam, _muons = onebit_jax.onebit_adam, onebit_jax.onebit_muon
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": dense("Adam", 2e-3, _adamw),
    "adam_bfloat16": Optimizer(
        "Adam, gradients in bfloat16", 2e-3, _adamw_in_bfloat16, rate_of="adam"
    ),
    "lamb": dense("LAMB", 1e-2, _by(optax.lamb)),
    "sgd": dense("SGD", 0.4, _sgd),
    "lion": dense("Lion", 3e-4, _lion),
    "muon": Optimizer("Muon", 8e-3, _muon(32, 32), exchange=_muons),
    "onebit_adam": onebit("1-bit Adam", 2e-3, _adam),
    "onebit_adam_8": onebit("1-bit Adam, warm-up at 8 bits", 2e-3, _adam, warmup_bits=8)._replace(
        rate_of="onebit_adam"
    ),
    "onebit_adam_4": onebit("1-bit Adam, warm-up at 4 bits", 2e-3, _adam, warmup_bits=4)._replace(
        rate_of="onebit_adam"
    ),
    "onebit_adam_refresh": onebit(
        "1-bit Adam, warm-up at 8 bits, refreshes",
        2e-3,
        _adam,
        warmup_bits=8,
        variance_refreshes=REFRESHES,
    )._replace(rate_of="onebit_adam"),
    "onebit_adam_matrices": onebit("1-bit Adam, norms and biases dense", 2e-3, _adam)._replace(
        make=_onebit_matrices
    ),
    "onebit_lamb": onebit("1-bit LAMB", 1e-2, onebit_jax.onebit_lamb),
    # Its variance begins at 0 and is not corrected for that, so that steps are larger than Adam's
    # at the same learning rate: the more so, the fewer refreshes there are.
    "zero_one_adam": _zero_one("0/1 Adam", 5e-4),
    "zero_one_adam_published": _zero_one(
        "0/1 Adam, published refreshes", 1.25e-4, var_update_scaler=16
    ),
    "birder": _birder("Birder", b=0.95),
    "birder_0.9": _birder("Birder, decay 0.9", b=0.9),
    "birder_0.98": _birder("Birder, decay 0.98", b=0.98),
    "signum": compressed("Signum", 3e-4, _by(onebit_jax.signum), onebit_jax.signum),
    "distributed_lion": compressed(
        "Distributed Lion",
        3e-4,
        _by(onebit_jax.distributed_lion, b2=0.99),
        onebit_jax.distributed_lion,
    ),
    "ef_signsgd": compressed("EF sign SGD", 0.4, _by(onebit_jax.ef_signsgd), onebit_jax.ef_signsgd),
    "onebit_muon": compressed("1-bit Muon", 8e-3, _muon(1, 2), _muons)._replace(rate_of="muon"),
    "onebit_muon_2": compressed("Muon, 2 bits", 8e-3, _muon(2, 8), _muons)._replace(rate_of="muon"),
    "onebit_muon_4": compressed("Muon, 4 bits", 8e-3, _muon(4, 8), _muons)._replace(rate_of="muon"),
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


def check_warmup(warmup: float | Literal["auto"], names: tuple[str, ...]) -> tuple[bool, str]:
    """Whether a warm-up is one that these optimizers have, and what it must be."""
    by_number = [x for x in names if x in OPTIMIZERS and OPTIMIZERS[x].freezes_by_number]
    expected = "a whole number of at least 1, a share of the steps below 1"
    if warmup == "auto":
        return not by_number, f"{expected} with {', '.join(by_number)}"
    whole = isinstance(warmup, int) and 1 <= warmup < 2**31
    return whole or 0 < warmup < 1, f"{expected}, or auto; below 2**31"


def warmup_end(
    warmup: int | Literal["auto"], schedule_warmup: int
) -> int | onebit_jax.VarianceStable:
    """When warm-up ends; by itself it does not before the learning rate has risen."""
    return onebit_jax.variance_stable(min_steps=schedule_warmup) if warmup == "auto" else warmup
