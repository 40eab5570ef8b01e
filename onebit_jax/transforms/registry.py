"""Every optimizer by name, for programs, plans, benchmarks and tests that hold for all of them.

A new one is a file and an entry here, or a call of :func:`register`: nothing else knows an
optimizer by its name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.transforms.birder import birder
from onebit_jax.transforms.compressed_mean import compressed_mean
from onebit_jax.transforms.distributed_lion import distributed_lion
from onebit_jax.transforms.ef_signsgd import ef_signsgd
from onebit_jax.transforms.local_steps import local_steps
from onebit_jax.transforms.onebit_adam import onebit_adam
from onebit_jax.transforms.onebit_lamb import onebit_lamb
from onebit_jax.transforms.onebit_muon import onebit_muon
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.signum import signum
from onebit_jax.transforms.step_sets import zero_one_adam_phase
from onebit_jax.transforms.warmup import Warmup
from onebit_jax.transforms.zero_one_adam import zero_one_adam

# Updates from one exchange to the next of an optimizer that takes local steps.
LOCAL_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the optimizers of a run have in common, each as far as it has such a thing.

    Attributes:
      learning_rate: a number, or a function of the number of updates made.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      steps: number of updates of the run.
      mask: which tensors are decayed, as in :func:`optax.adamw`.
      warmup: when the optimizers with a dense warm-up end it.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the variance's root.
      weight_decay: decoupled weight decay.
      bits: per value, for those that let one choose; None for what each has by default.
      exchange: options of the exchange.
    """

    learning_rate: optax.ScalarOrSchedule
    axis_name: str | tuple[str, str]
    steps: int = 1000
    mask: Any = None
    warmup: Warmup = 100
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bits: int | None = None
    exchange: ExchangeOptions = ExchangeOptions()

    def decay_options(self) -> dict[str, Any]:
        """What all optimizers take."""
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "mask": self.mask,
        }

    def adam_options(self) -> dict[str, Any]:
        """What Adam and its relatives take."""
        return self.decay_options() | {"b1": self.b1, "b2": self.b2, "eps": self.eps}

    def exchange_options(self) -> dict[str, Any]:
        """What every optimizer of this library takes."""
        return {"axis_name": self.axis_name, "exchange": self.exchange}

    def bits_option(self) -> dict[str, Any]:
        """The bits, if they are chosen."""
        return {} if self.bits is None else {"bits": self.bits}


PhaseOf = Callable[[int, int, int], Phase]


class Entry(NamedTuple):
    """An optimizer as those need it that hold for all.

    Attributes:
      label: its name in tables and pictures.
      make: the transformation for a setting; a ``ValueError`` names what is out of range.
      learning_rate: the peak that a sweep begins from.
      warms_up: whether updates are dense until the variance is frozen, and compressed after it.
      freezes_by_number: whether its variance freezes after a number of updates only.
      local_steps: whether the workers' parameters differ between exchanges; its state then has
        ``synced_parameters``.
      phase_of: the phase of an update, from the number of updates made before it, the number of
        dense ones, and the number of updates of the run; None for what ``warms_up`` says.
      bits: per parameter, each way, in a compressed update.
      rounds: share of the updates after a warm-up in which it exchanges anything.
      encoding_bytes: bytes per element that encoding and decoding read and write beyond what Adam's
        own update does; docs/plan.md says how they are counted.
      benchmark: the kind of ``benchmarks.step`` that times it, if that has another name.
      planned: whether a plan has a row for it.
      advised: whether a plan's advice may be to use it: for a dense run's loss, with nothing else
        to choose.
    """

    label: str
    make: Callable[[Setting], optax.GradientTransformation]
    learning_rate: float
    warms_up: bool = False
    freezes_by_number: bool = False
    local_steps: bool = False
    phase_of: PhaseOf | None = None
    bits: int = 1
    rounds: float = 1.0
    encoding_bytes: float = 13.0
    benchmark: str | None = None
    planned: bool = True
    advised: bool = False

    def phase(self, step: int, warmup: int, steps: int) -> Phase:
        """The phase of the update after so many."""
        if self.phase_of is not None:
            return self.phase_of(step, warmup, steps)
        return "warmup" if self.warms_up and step < warmup else "compression"


def _zero_one_steps(warmup: Any, steps: int) -> dict[str, Any]:
    """0/1 Adam's step sets: gaps between syncs double as early in a run as in the paper's."""
    return {
        "variance_freeze": warmup,
        # Refreshed in every update until it freezes.
        "var_update_scaler": warmup,
        # In the paper every 32,768 of 152,000 updates.
        "local_step_scaler": max(1, round(steps * 32768 / 152000)),
    }


def _zero_one_adam(s: Setting) -> optax.GradientTransformation:
    steps = _zero_one_steps(s.warmup, s.steps)
    return zero_one_adam(**s.adam_options(), **steps, **s.exchange_options())


def _zero_one_phase(step: int, warmup: int, steps: int) -> Phase:
    return zero_one_adam_phase(step, **_zero_one_steps(warmup, steps))


def _ef_signsgd(s: Setting) -> optax.GradientTransformation:
    exchange = dataclasses.replace(s.exchange, scale="mean_abs")
    options = s.decay_options() | {"axis_name": s.axis_name, "exchange": exchange}
    return ef_signsgd(**options, momentum=s.b1)


def _onebit_muon(s: Setting) -> optax.GradientTransformation:
    """Muon on matrices, Adam at the same learning rate on embeddings, norms and biases."""

    def matrices(params: Any) -> Any:
        def is_matrix(path: Any, p: Any) -> bool:
            return jnp.ndim(p) == 2 and p.size > 0 and "embedding" not in str(path[-1:])

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return onebit_muon(
        s.learning_rate,
        weight_decay=s.weight_decay,
        matrices=matrices,
        adam_b1=s.b1,
        adam_b2=s.b2,
        adam_bits=2,
        # Steps about as long as AdamW's.
        consistent_rms=0.2,
        **s.exchange_options(),
        **s.bits_option(),
    )


def _local_steps(s: Setting) -> optax.GradientTransformation:
    """AdamW on every worker for itself, averaged every few steps."""
    inner = optax.adamw(**s.adam_options())
    options = s.exchange_options() | s.bits_option()
    return local_steps(inner, optax.sgd(1.0), every=LOCAL_STEPS, **options)


def _compressed_sgd(s: Setting) -> optax.GradientTransformation:
    return optax.chain(
        compressed_mean(**s.exchange_options(), **s.bits_option()),
        optax.trace(s.b1),
        optax.add_decayed_weights(s.weight_decay, s.mask),
        optax.scale_by_learning_rate(s.learning_rate),
    )


REGISTRY: dict[str, Entry] = {
    # Passes over memory less Adam's 28 bytes: the worker reads g and c, writes c and reads it for
    # the scale and for the signs (20); the server does so with its chunk (16 / n, at most 8);
    # decoding reads the reciprocal root and the parameter and writes it (12); bits are under 1.
    "onebit_adam": Entry(
        "1-bit Adam",
        lambda s: onebit_adam(**s.adam_options(), warmup=s.warmup, **s.exchange_options()),
        2e-3,
        warms_up=True,
        advised=True,
    ),
    # It also brings the gradients together as one tensor (8) and goes twice over the fresh
    # variance, the reciprocal root and the parameters (8 + 4 + 4 + 4).
    "onebit_lamb": Entry(
        "1-bit LAMB",
        lambda s: onebit_lamb(**s.adam_options(), warmup=s.warmup, **s.exchange_options()),
        1e-2,
        warms_up=True,
        encoding_bytes=41,
    ),
    # Its variance begins at 0 and is not corrected for that, so that steps are larger than Adam's
    # at the same learning rate. The published step sets exchange in this share of the paper's
    # 152,000 updates, of which 12,500 come before the freeze. A sync reads B and y and writes them,
    # less m's decoding (14).
    "zero_one_adam": Entry(
        "0/1 Adam",
        _zero_one_adam,
        5e-4,
        freezes_by_number=True,
        local_steps=True,
        phase_of=_zero_one_phase,
        rounds=0.49,
        encoding_bytes=27,
        benchmark="0/1 Adam, sync",
    ),
    # No scales or residuals: it reads both averages once more to draw signs.
    "birder": Entry(
        "Birder",
        lambda s: birder(**s.decay_options(), seed=0, **s.exchange_options()),
        1.2e-3,
        # In the first update workers also tell each other where they have gradients.
        phase_of=lambda step, *_: "compression" if step else "warmup",
        encoding_bytes=8,
    ),
    # The next two read and write less than Adam does.
    "signum": Entry(
        "Signum",
        lambda s: signum(**s.decay_options(), b1=s.b1, **s.exchange_options()),
        3e-4,
        encoding_bytes=0,
    ),
    "distributed_lion": Entry(
        "Distributed Lion",
        lambda s: distributed_lion(**s.decay_options(), b1=s.b1, **s.exchange_options()),
        3e-4,
        encoding_bytes=0,
    ),
    "ef_signsgd": Entry("EF sign SGD", _ef_signsgd, 0.4),
    # Orthogonalizing is Muon's own compute, so that its exchange is timed before Adam.
    "onebit_muon": Entry("1-bit Muon", _onebit_muon, 8e-3, benchmark="compressed_mean, Adam"),
    "local_steps": Entry(
        "Local steps, float32",
        _local_steps,
        2e-3,
        local_steps=True,
        phase_of=lambda step, *_: "local" if (step + 1) % LOCAL_STEPS else "sync",
        bits=32,
        rounds=1 / LOCAL_STEPS,
        encoding_bytes=28,
        # A plan has rows for any interval and bits.
        planned=False,
    ),
    "compressed_mean_sgd": Entry("SGD, compressed mean", _compressed_sgd, 0.4, planned=False),
}


def register(name: str, entry: Entry) -> None:
    """Adds an optimizer: to plans, ``train.compare``, benchmarks and the tests of all.

    It is tried on a small tree: made, and updated in each of its phases.

    Args:
      name: by which it is chosen.
      entry: the optimizer.

    Raises:
      ValueError: for a name that is taken, and for an algorithm that breaks the contract of
        :mod:`onebit_jax.transforms.algorithm`, which it names.
    """
    if name in REGISTRY:
        raise ValueError(f"name={name!r} is taken by {REGISTRY[name].label}: choose another.")
    params = {"matrix": jnp.ones((2, 3)), "vector": jnp.ones(2)}

    def updated(params: Any) -> Any:
        tx = optax.with_extra_args_support(entry.make(Setting(1e-3, "workers", warmup=1)))
        return tx.update(params, tx.init(params), params)

    jax.eval_shape(jax.vmap(updated, axis_name="workers", axis_size=1, in_axes=None), params)
    REGISTRY[name] = entry
