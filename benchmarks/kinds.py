"""What is timed: optimizers, each in a phase and in one of the loops that a user may run it in."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax
import optax.contrib
from jax import lax

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.transforms.algorithm import Phase
from train.registry import REGISTRY, Setting

AXIS = "workers"
PAIR = ("node", "local")

Loop = Literal["train_step", "own", "bare"]

# README's, on both sides of every comparison with 1-bit Adam.
_WEIGHT_DECAY = 0.01

_COMPRESSING: tuple[Phase, ...] = ("warmup", "compression")

# Timed with the options of README, or beside another dense optimizer.
_OWN_ROWS = ("1-bit Adam", "1-bit LAMB")


class Kind(NamedTuple):
    """One line of the table: an optimizer in a phase, in a loop.

    Attributes:
      make: the optimizer, whose warm-up, if any, ends after one update or never.
      phases: of the updates to make, of which the last is timed, again and again.
      loop: `"train_step"` is README's loop: :func:`onebit_jax.init`,
        :func:`onebit_jax.train_step` with default arguments, and no look at the metrics. `"own"`
        is a jitted `shard_map` of the user's own, with loss and gradients. `"bare"` is the same
        without: the optimizer alone, whose gradients are there already.
      told: whether the phase is passed in; else the step or the optimizer finds it out.
      dense: the kind that it is compared with.
      nodes_of_two: whether its axes are `PAIR`, with two devices a node.
      exchanges: whether it averages over the workers; `onebit_jax.init` refuses what does not.
    """

    make: Callable[[], optax.GradientTransformation]
    phases: tuple[Phase | None, ...] = (None,)
    loop: Loop = "train_step"
    told: bool = False
    dense: str = "Adam with pmean"
    nodes_of_two: bool = False
    exchanges: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its mesh's axes."""
        return PAIR if self.nodes_of_two else (AXIS,)

    def alone(self, *, told: bool = False) -> "Kind":
        """The optimizer alone, beside Adam alone."""
        return self._replace(loop="bare", told=told, dense="Adam with pmean, bare optimizer")


def dense(
    optimizer: optax.GradientTransformation,
    loop: Loop = "own",
    mean: optax.GradientTransformation | None = None,
) -> Kind:
    """Any optimizer behind a mean, which is at full precision if none is given."""
    mean = mean or optax.stateless(lambda gradients, _: lax.pmean(gradients, AXIS))
    return Kind(lambda: optax.chain(mean, optimizer), loop=loop)


def adamw() -> optax.GradientTransformation:
    """What README has in the place of 1-bit Adam; "Adam" in the names of kinds."""
    return optax.adamw(1e-4, weight_decay=_WEIGHT_DECAY)


def onebit_adam(
    make: Callable[..., Any] = onebit_jax.onebit_adam,
    *,
    forever_dense: bool = False,
    **options: Any,
) -> Kind:
    """1-bit Adam in compression, where no refresh is due, or in a warm-up that does not end."""
    warmup = 10**9 if forever_dense else 1
    options = {"warmup": warmup, "weight_decay": _WEIGHT_DECAY, "axis_name": AXIS} | options
    options = {"variance_refreshes": lambda count: count < 0} | options
    phases: tuple[Phase, ...] = ("warmup",) if forever_dense else _COMPRESSING
    return Kind(lambda: make(1e-4, **options), phases)


def _onebit_lamb(**options: Any) -> Kind:
    """1-bit LAMB in the phases of :func:`onebit_adam`."""
    return onebit_adam(onebit_jax.onebit_lamb, **options)._replace(dense="LAMB with pmean")


def _zero_one_adam(phase: Phase) -> Kind:
    # By the published step sets every update for a long time is a sync.
    steps: dict[str, Any] = {"sync_steps": lambda count: count < 0} if phase == "local" else {}
    return Kind(
        lambda: onebit_jax.zero_one_adam(1e-4, variance_freeze=1, axis_name=AXIS, **steps),
        ("warmup", phase),
    )


def _birder() -> Kind:
    # Its first update counts as warm-up: inactive elements are found then.
    return Kind(lambda: onebit_jax.birder(1e-4, seed=0, axis_name=AXIS), _COMPRESSING)


def _registered() -> dict[str, Kind]:
    """Optimizers of the registry that exchange in every update, by their labels."""
    setting = Setting(1e-4, AXIS, warmup=1)
    names = "onebit_adam", "onebit_lamb", "birder", "signum", "distributed_lion", "ef_signsgd"
    return {
        REGISTRY[name].label: Kind(functools.partial(REGISTRY[name].make, setting), _COMPRESSING)
        for name in names
    }


def for_compilers() -> dict[str, Kind]:
    """AdamW and 1-bit Adam, alone, in all the programs that 1-bit Adam has."""
    onebit = onebit_adam().alone(told=True)
    return {
        "AdamW with pmean": dense(adamw()).alone(),
        "1-bit Adam, warm-up": onebit._replace(phases=("warmup",)),
        "1-bit Adam, compression": onebit._replace(phases=("compression",)),
        "1-bit Adam, all phases": onebit._replace(told=False),
    }


def every_optimizer() -> dict[str, Kind]:
    """The optimizers that :func:`for_compilers` leaves out, alone, a program for each phase."""
    phased: dict[str, tuple[Kind, tuple[Phase, ...]]] = {
        "1-bit Adam": (onebit_adam(), ("refresh",)),
        "1-bit LAMB": (_onebit_lamb(), (*_COMPRESSING, "refresh")),
        "0/1 Adam": (_zero_one_adam("sync"), (*_COMPRESSING, "local", "sync")),
        "Birder": (_birder(), _COMPRESSING),
    }
    muon = REGISTRY["onebit_muon"]
    alone = {
        "LAMB with pmean": dense(optax.lamb(1e-4, weight_decay=_WEIGHT_DECAY)).alone(),
        "Muon with pmean": dense(optax.contrib.muon(1e-4)).alone(),
        muon.label: Kind(functools.partial(muon.make, Setting(1e-4, AXIS, warmup=1))).alone(),
    }
    for name, (kind, phases) in phased.items():
        for phase in phases:
            words = phase.replace("warmup", "warm-up")
            alone[f"{name}, {words}"] = kind.alone(told=True)._replace(phases=(phase,))
    others = {name: kind.alone() for name, kind in _registered().items() if name not in phased}
    return alone | others


def kinds() -> dict[str, Kind]:
    """All kinds by name; README's loop first, beside the dense step that a user would write."""
    adam, lamb = adamw(), optax.lamb(1e-4, weight_decay=_WEIGHT_DECAY)
    onebit, dense_warmup = onebit_adam(), onebit_adam(forever_dense=True, warmup_bits=32)
    return {
        "Adam with pmean": dense(adam),
        "Adam with pmean, train_step": dense(adam, "train_step"),
        "1-bit Adam": onebit,
        "1-bit Adam, phase given": onebit._replace(told=True),
        "1-bit Adam, warm-up at 4 bits": onebit_adam(forever_dense=True),
        "1-bit Adam, warm-up": dense_warmup,
        "1-bit Adam, own loop": onebit._replace(loop="own"),
        "1-bit Adam, own loop, phase given": onebit._replace(loop="own", told=True),
        "Adam with pmean, bare optimizer": dense(adam).alone(),
        "1-bit Adam, bare optimizer": onebit.alone(),
        "1-bit Adam, bare optimizer, phase given": onebit.alone(told=True),
        "1-bit Adam, warm-up, bare optimizer": dense_warmup.alone(told=True),
        "EC1, exchange alone": Kind(lambda: onebit_jax.compressed_mean(AXIS)).alone(),
        "Adam, no exchange": Kind(lambda: adam, loop="own", exchanges=False),
        "1-bit Adam, bfloat16 residuals": onebit_adam(
            exchange=ExchangeOptions(residual_dtype="bfloat16")
        ),
        "1-bit Adam, nodes of two": onebit_adam(axis_name=PAIR)._replace(nodes_of_two=True),
        "LAMB with pmean": dense(lamb),
        "1-bit LAMB, warm-up": _onebit_lamb(forever_dense=True, warmup_bits=32),
        "1-bit LAMB": _onebit_lamb(),
        "0/1 Adam, sync": _zero_one_adam("sync"),
        "0/1 Adam, local": _zero_one_adam("local"),
        **{label: kind for label, kind in _registered().items() if label not in _OWN_ROWS},
        "compressed_mean, Adam": Kind(
            lambda: optax.chain(onebit_jax.compressed_mean(AXIS), adam),
        ),
        "compressed_mean at 8 bits, Adam": Kind(
            lambda: optax.chain(onebit_jax.compressed_mean(AXIS, 8), adam),
        ),
        "compressed_mean at 4 bits, Adam": Kind(
            lambda: optax.chain(onebit_jax.compressed_mean(AXIS, 4), adam),
        ),
    }
