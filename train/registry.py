"""Every optimizer by name, for programs, benchmarks and tests that cover all of them.

To add an optimizer, write a file and an entry here, or call :func:`register`: no other module knows
an optimizer's name. Dense ones come first, as in tables.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import (
    ExchangeOptions,
    birder,
    compressed_mean,
    distributed_lion,
    ef_signsgd,
    local_steps,
    mean_gradients,
    onebit_adam,
    onebit_adam_published,
    onebit_lamb,
    onebit_muon,
    signum,
    zero_one_adam,
)
from onebit_jax.contrib import (
    Drive,
    LargestValues,
    MajorityVote,
    cada,
    fetch_sgd,
    onebit_lamb_published,
)
from onebit_jax.transforms.algorithm import Phase
from onebit_jax.transforms.schedules import Warmup, published_sync_steps

# Updates between two exchanges of an optimizer with local steps.
LOCAL_STEPS = 16
GEOMESH_STEPS = 50
# Of all values, the share that is sent with a threshold.
_LARGEST = 0.01
_IN_ONE_ARGUMENT = {field.name for field in dataclasses.fields(ExchangeOptions)}
# A run's options of the exchange, by the names of constructors' and `ExchangeOptions`' arguments.
# Of a model whose tensors are split between a worker's devices there is `scale_per` besides.
EXCHANGE = ("bits", "warmup_bits", "variance_refreshes", "scale", "residual_dtype")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hyperparameters of a run; each optimizer uses those that it has.

    Attributes:
      learning_rate: a number, or a function of the number of updates made.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      steps: number of updates of the run.
      mask: which tensors are decayed, as in :func:`optax.adamw`.
      warmup: the end of the dense warm-up, of optimizers that have one.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the variance's root.
      weight_decay: decoupled weight decay.
      exchange: options of the exchange, some of :data:`EXCHANGE`; they override an optimizer's own.
    """

    learning_rate: optax.ScalarOrSchedule
    axis_name: Any
    steps: int = 1000
    mask: Any = None
    warmup: Warmup = 100
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    exchange: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def call(self, function: Callable[..., Any], **own: Any) -> Any:
        """Calls a constructor with the fields that it takes; ``own`` arguments override them.

        The setting's options of the exchange override both.
        """
        taken = inspect.signature(function).parameters
        offered = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        offered |= {"momentum": self.b1} | own | dict(self.exchange)
        if "exchange" in taken:
            default = own.get("exchange", taken["exchange"].default)
            chosen = {x: y for x, y in self.exchange.items() if x in _IN_ONE_ARGUMENT}
            offered["exchange"] = dataclasses.replace(default, **chosen)
        return function(**{name: value for name, value in offered.items() if name in taken})


class Entry(NamedTuple):
    """An optimizer, as programs, benchmarks and tests need it.

    Attributes:
      label: its name in tables and pictures.
      learning_rate: the peak learning rate with which a sweep begins.
      make: makes the transformation for a setting; raises ``ValueError`` for values out of range.
      first_phase: the phase of the first update. A dense optimizer is always in "warmup".
      exchange: the constructor whose options of the exchange it has; None for a dense optimizer.
      feedback: whether it has error feedback at one bit, with a scale and residuals.
      compressor: whether its compressor is given, so that no number of bits can be chosen.
      warms_up: whether all updates are dense until the variance is frozen, and compressed after it.
      freezes_by_number: whether its variance can freeze only after a given number of updates.
      follows_steps: whether its options follow from the run's number of steps.
      local_steps: whether the workers' parameters differ between exchanges; its state then has
        ``synced_parameters``.
      rate_of: for a variant, the optimizer whose best learning rate it uses.
    """

    label: str
    learning_rate: float
    make: Callable[[Setting], optax.GradientTransformation]
    first_phase: Phase = "warmup"
    exchange: Callable[..., Any] | None = None
    feedback: bool = True
    compressor: bool = False
    warms_up: bool = False
    freezes_by_number: bool = False
    follows_steps: bool = False
    local_steps: bool = False
    rate_of: str | None = None

    @property
    def options(self) -> set[str]:
        """The names of its options of the exchange."""
        taken = inspect.signature(self.exchange).parameters if self.exchange else {}
        in_one = _IN_ONE_ARGUMENT if self.feedback and "exchange" in taken else set()
        own = {x for x in EXCHANGE if x in taken} | in_one
        return own - {"bits"} if self.compressor else own


def made_by(label: str, learning_rate: float, function: Callable[..., Any], **own: Any) -> Entry:
    """The entry of an optimizer that a constructor makes with these arguments."""
    return Entry(label, learning_rate, lambda s: s.call(function, **own), exchange=function)


def warming_up(label: str, learning_rate: float, function: Callable[..., Any], **own: Any) -> Entry:
    """The entry of an optimizer that begins dense and compresses once its variance is frozen."""
    return made_by(label, learning_rate, function, **own)._replace(warms_up=True)


def compressed(label: str, learning_rate: float, function: Callable[..., Any], **own: Any) -> Entry:
    """The entry of an optimizer that compresses from the first update on."""
    return made_by(label, learning_rate, function, **own)._replace(first_phase="compression")


def zero_one(label: str, learning_rate: float) -> Entry:
    """0/1 Adam; gaps between syncs double at the same share of a run as in the paper."""

    def make(setting: Setting) -> optax.GradientTransformation:
        # In the paper every 32,768 of 152,000 updates.
        doubling = max(1, round(setting.steps * 32768 / 152000))
        freeze = setting.warmup
        return setting.call(
            zero_one_adam,
            variance_freeze=freeze,
            # Refreshed in every update until it freezes.
            variance_steps=lambda count: count < freeze,
            sync_steps=published_sync_steps(freeze, doubling, 16),
        )

    made = Entry(label, learning_rate, make, exchange=zero_one_adam)
    return made._replace(local_steps=True, freezes_by_number=True, follows_steps=True)


def muon(label: str, bits: int, adam_bits: int) -> Entry:
    """Muon on matrices, Adam at the same learning rate on embeddings, norms and biases."""

    def matrices(params: Any) -> Any:
        def is_matrix(path: Any, p: Any) -> bool:
            name = jax.tree_util.keystr(path[-1:], simple=True)
            return jnp.ndim(p) == 2 and p.size > 0 and name != "embedding"

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    def make(setting: Setting) -> optax.GradientTransformation:
        own = {"adam_b1": setting.b1, "adam_b2": setting.b2, "adam_bits": adam_bits}
        # Steps about as long as AdamW's, so that both have one learning rate.
        own |= {"bits": bits, "matrices": matrices, "consistent_rms": 0.2}
        own |= {"adam_learning_rate": setting.learning_rate}
        return setting.call(onebit_muon, **own)

    return Entry(label, 8e-3, make, "compression", onebit_muon, rate_of="muon")


def local(label: str, bits: int, every: int = LOCAL_STEPS, **own: Any) -> Entry:
    """AdamW on every worker independently; averages parameters at ``bits`` every few steps.

    With an own ``compressor`` at what that sends.
    """

    def make(setting: Setting) -> optax.GradientTransformation:
        optimizers = {"inner": setting.call(optax.adamw), "outer": optax.sgd(1.0)}
        return setting.call(local_steps, **optimizers, every=every, **{"bits": bits} | own)

    made = Entry(label, 2e-3, make, "local", local_steps, local_steps=True, rate_of="local_steps")
    return made._replace(compressor="compressor" in own)


def geomesh(setting: Setting) -> optax.GradientTransformation:
    """GeoMesh: local steps of Lion whose progress is voted on, with the paper's constants."""
    return setting.call(
        local_steps,
        inner=setting.call(optax.lion, b2=0.99),
        outer=optax.sgd(0.3, momentum=0.9, nesterov=True),
        every=GEOMESH_STEPS,
        compressor=MajorityVote(),
    )


def thresholded_adam(setting: Setting) -> optax.GradientTransformation:
    """Adam on the largest values, whose threshold is renewed twenty times in a run."""
    compressor = LargestValues(_LARGEST, max(1, setting.steps // 20))
    mean = setting.call(compressed_mean, compressor=compressor)
    return optax.chain(mean, setting.call(optax.adamw))


def after(
    mean: Callable[..., Any], label: str, learning_rate: float, make: Callable[[Setting], Any]
) -> Entry:
    """An optimizer of Optax, on gradients averaged at full precision or at one bit per element."""

    def chained(setting: Setting) -> optax.GradientTransformation:
        return optax.chain(setting.call(mean), make(setting))

    if mean is mean_gradients:
        return Entry(label, learning_rate, chained)
    return Entry(label, learning_rate, chained, "compression", mean)


def adamw(setting: Setting) -> optax.GradientTransformation:
    """As ``optax.adamw``."""
    return setting.call(optax.adamw)


def sgd(setting: Setting) -> optax.GradientTransformation:
    """As ``optax.sgd`` with momentum, and decoupled weight decay."""
    return optax.chain(
        optax.trace(setting.b1),
        optax.add_decayed_weights(setting.weight_decay, setting.mask),
        optax.scale_by_learning_rate(setting.learning_rate),
    )


REGISTRY: dict[str, Entry] = {
    "adam": after(mean_gradients, "Adam", 2e-3, adamw),
    "lamb": after(mean_gradients, "LAMB", 1e-2, lambda setting: setting.call(optax.lamb)),
    "sgd": after(mean_gradients, "SGD", 0.4, sgd),
    # Its momentum averages over ten times as many steps as its vote, so it has its own b2.
    "lion": after(mean_gradients, "Lion", 3e-4, lambda setting: setting.call(optax.lion, b2=0.99)),
    "muon": muon("Muon", 32, 32)._replace(first_phase="warmup", rate_of=None),
    "onebit_adam": warming_up("1-bit Adam", 2e-3, onebit_adam),
    "onebit_adam_frozen": warming_up(
        "1-bit Adam, dense warm-up, frozen variance",
        2e-3,
        onebit_adam,
        warmup_bits=32,
        variance_refreshes=None,
    ),
    "onebit_adam_published": warming_up("1-bit Adam, as published", 2e-3, onebit_adam_published),
    "onebit_lamb": warming_up("1-bit LAMB", 1e-2, onebit_lamb),
    "onebit_lamb_published": warming_up("1-bit LAMB, published", 1e-2, onebit_lamb_published),
    # Its variance begins at 0 without bias correction, so steps are larger than Adam's at the same
    # learning rate, and larger still with fewer refreshes.
    "zero_one_adam": zero_one("0/1 Adam", 5e-4),
    # In the first update workers also share where they have gradients.
    "birder": made_by("Birder", 1.2e-3, birder, seed=0)._replace(feedback=False),
    "signum": compressed("Signum", 3e-4, signum)._replace(feedback=False),
    "distributed_lion": compressed("Distributed Lion", 3e-4, distributed_lion, b2=0.99)._replace(
        feedback=False
    ),
    "ef_signsgd": compressed("EF sign SGD", 0.4, ef_signsgd),
    "onebit_muon": muon("Muon, 4 bits", 4, 8),
    "onebit_muon_1": muon("1-bit Muon", 1, 2),
    "local_steps": local("Local steps, float32", 32)._replace(rate_of=None),
    "local_steps_4": local("Local steps, 4 bits", 4),
    # In every update a group of tensors is exchanged, beside the gradients of the next one.
    "local_steps_4_streaming": local(
        "Local steps, 4 bits, streaming", 4, fragments=LOCAL_STEPS, delay=1
    ),
    "local_steps_drive": local("Local steps, DRIVE", 32, compressor=Drive()),
    "geomesh": Entry("GeoMesh", 3e-4, geomesh, "local", local_steps)._replace(
        feedback=False, compressor=True, local_steps=True
    ),
    "thresholded_adam": Entry(
        "Adam, largest 1 %", 2e-3, thresholded_adam, "compression", compressed_mean
    )._replace(feedback=False, compressor=True, follows_steps=True),
    "fetch_sgd": compressed("FetchSGD", 0.1, fetch_sgd)._replace(feedback=False),
    # How many updates exchange, the run decides.
    "cada_adam": after(cada, "CADA", 2e-3, adamw)._replace(first_phase="sync", feedback=False),
    "compressed_mean_adam": after(compressed_mean, "Adam, compressed mean", 2e-3, adamw),
    "compressed_mean_sgd": after(compressed_mean, "SGD, compressed mean", 0.4, sgd),
}


def register(name: str, entry: Entry) -> None:
    """Adds an optimizer to ``train.compare``, benchmarks and the tests of all optimizers.

    Raises:
      ValueError: for a name that is taken.
    """
    if name in REGISTRY:
        raise ValueError(f"name={name!r} is taken by {REGISTRY[name].label}: choose another.")
    REGISTRY[name] = entry
