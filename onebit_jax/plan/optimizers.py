"""The optimizers that a plan compares."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from onebit_jax.programs.over_workers import abstract_mesh
from onebit_jax.states import placement
from onebit_jax.transforms import registry
from onebit_jax.transforms.compressed_mean import compressed_mean
from onebit_jax.transforms.zero_one_adam import zero_one_adam

FLOAT32_BYTES = 4.0
WARMUP_BITS = (32, 16, 8, 4)
LOCAL_BITS = (32, 8, 4, 2, 1)
Form = Literal["dense", "flat", "hierarchical"]


def bytes_at(bits: int) -> float:
    """Bytes per parameter each way on the wire, with the scales of 2 to 8 bits."""
    return bits / 8 + (4 / 256 if 1 < bits < 16 else 0.0)


def encoding_bytes_at(bits: int) -> float:
    """Bytes an element that the exchange at 2, 4 or 8 bits reads and writes on a device.

    The worker reads the value and what it compressed last and writes their sum (12), and reads that
    for the scales and for the levels (8); the server does so with its chunk (16 / n, at most 8);
    the mean is written (4); levels are written and read twice.
    """
    return 32 + 4 * bits / 8


# So that rows with the same options are equal.
_local = functools.cache(registry.local)


def _adam(setting: registry.Setting) -> optax.GradientTransformation:
    return setting.call(optax.adam)


class Optimizer(NamedTuple):
    """A row of the table.

    Attributes:
      name: as it is printed.
      exchange: the collectives it uses; :mod:`~onebit_jax.plan.model` says what they
        send.
      bytes_per_parameter: on the wire, after the warm-up if it has one.
      benchmark: the kind of ``benchmarks.step`` that calibrates it, :attr:`kinds` with its warm-up.
      rounds: share of the steps after the warm-up in which it exchanges anything.
      warmup: whether a run begins with steps that exchange gradients at the setting's
        ``warmup_bits``.
      refreshed: whether some steps after the warm-up, at growing gaps, exchange gradients as it
        does, too.
      published_steps: whether it exchanges in the step sets that 0/1 Adam has by default, its
        variance freezing at the end of the setting's warm-up.
      encoding_bytes: bytes an element that encoding and decoding read and write beyond what Adam's
        own update does.
      late: whether an exchange is needed only at the end of the next step, so that all of its
        compute may hide it.
      local: whether what is exchanged is known only after the update, so that no compute hides it.
      advised: whether the advice may be to use it: for a dense run's loss alone, and with nothing
        else to choose.
      make: makes it, for the size of its state.
    """

    name: str
    exchange: Form
    bytes_per_parameter: float
    benchmark: str
    rounds: float = 1.0
    warmup: bool = False
    refreshed: bool = False
    published_steps: bool = False
    encoding_bytes: float = 0.0
    late: bool = False
    local: bool = False
    advised: bool = False
    make: Callable[[registry.Setting], optax.GradientTransformation] = _adam

    def kinds(self, warmup_bits: int) -> tuple[str, ...]:
        """The kinds of ``benchmarks.step`` that calibrate it, of its warm-up last."""
        if not self.warmup:
            return (self.benchmark,)
        own = f"{self.benchmark}, warm-up"
        return (self.benchmark, own if warmup_bits >= 16 else _mean_kind(warmup_bits))


def _mean_kind(bits: int) -> str:
    return f"compressed_mean at {bits} bits, Adam"


def _on_mean(bits: int, setting: registry.Setting) -> optax.GradientTransformation:
    return optax.chain(setting.call(compressed_mean, bits=bits), _adam(setting))


FLOAT32 = Optimizer("dense float32", "dense", FLOAT32_BYTES, "Adam with pmean")
BFLOAT16 = Optimizer("dense bfloat16", "dense", 2, "Adam with pmean")
COMPRESSED_MEAN_8, COMPRESSED_MEAN_4 = (
    Optimizer(
        f"Adam on a mean at {bits} bits",
        "hierarchical",
        bytes_at(bits),
        _mean_kind(bits),
        encoding_bytes=encoding_bytes_at(bits),
        make=functools.partial(_on_mean, bits),
    )
    for bits in (8, 4)
)
# The correction also reads the last update and writes this one (8). No mean at one bit is timed;
# one at four takes longer.
MUON_ONE_STEP_LATE = Optimizer(
    "1-bit Muon, one step late",
    "hierarchical",
    bytes_at(1),
    _mean_kind(4),
    encoding_bytes=encoding_bytes_at(1) + 8,
    late=True,
    make=registry.muon("1-bit Muon", 1, 2, delay=1).make,
)


def row(name: str, exchange: Form = "hierarchical") -> Optimizer:
    """An optimizer of ``onebit_jax.transforms.registry.REGISTRY``, by its name there."""
    entry = registry.REGISTRY[name]
    return Optimizer(
        # The one that the advice may be to use is planned for both.
        f"{entry.label}, {exchange}" if entry.advised else entry.label,
        exchange,
        bytes_at(entry.bits),
        entry.benchmark or entry.label,
        rounds=entry.rounds,
        warmup=entry.warms_up,
        refreshed=entry.refreshed,
        published_steps=entry.exchange is zero_one_adam,
        encoding_bytes=entry.encoding_bytes,
        advised=entry.advised,
        make=entry.make,
    )


def rows() -> tuple[Optimizer, ...]:
    """All of the registry, Muon one step late, Adam on means at a few bits; not local steps."""
    flat = [row(name, "flat") for name, entry in registry.REGISTRY.items() if entry.advised]
    nodes = [row(name) for name, entry in registry.REGISTRY.items() if entry.planned]
    return (*flat, *nodes, MUON_ONE_STEP_LATE, COMPRESSED_MEAN_8, COMPRESSED_MEAN_4)


def local_steps(every: int, bits: int) -> Optimizer:
    """Local steps that exchange every so many updates; with 32 bits DiLoCo.

    In addition to the exchange's work, ``x``, ``x_i``, the mean and the outer momentum ``u`` are
    read, and ``u``, ``x`` and ``x_i`` written (28).

    Raises:
      ValueError: unless ``every`` is an int of at least 1, and ``bits`` one of ``LOCAL_BITS``.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} must be an int of at least 1, in steps.")
    if bits not in LOCAL_BITS:
        raise ValueError(f"bits={bits!r} must be one of {LOCAL_BITS}.")
    if bits == 32:
        name, benchmark, encoding = "DiLoCo", "Adam with pmean", 0.0
    elif bits == 1:
        name, benchmark, encoding = "local steps, 1 bit", "1-bit Adam", 13.0
    else:
        name, benchmark = f"local steps, {bits} bits", _mean_kind(bits)
        encoding = encoding_bytes_at(bits)
    return Optimizer(
        f"{name}, every {every}",
        "dense" if bits == 32 else "hierarchical",
        bytes_at(bits),
        benchmark,
        rounds=1 / every,
        encoding_bytes=encoding + 28,
        local=True,
        make=_local("local steps", bits, every).make,
    )


def state_bytes(optimizer: Optimizer, workers: int, workers_per_node: int = 1) -> float:
    """Bytes of an optimizer's state on a device for each parameter that the device holds.

    Exact for a matrix of ``2**20`` parameters; small ones are padded.

    Args:
      optimizer: a row of a plan.
      workers: how many exchange.
      workers_per_node: how many of them share a card, in the hierarchical form.

    >>> [round(state_bytes(x, workers=8), 2) for x in (FLOAT32, row("onebit_adam"))]
    [8.0, 8.75]
    """
    axes = {"data": workers}
    if workers_per_node > 1 and optimizer.exchange == "hierarchical":
        axes = {"node": workers // workers_per_node, "local": workers_per_node}
    mesh, names = abstract_mesh(axes), tuple(axes)
    axis_name: Any = names if "node" in axes else "data"
    tx = optimizer.make(registry.Setting(1e-3, axis_name))
    params: Any = {"w": jax.ShapeDtypeStruct((2**10, 2**10), jnp.float32)}
    shapes = placement.state_shapes(tx, params, mesh)
    specs = placement.state_specs(shapes, names)

    def held(x: jax.ShapeDtypeStruct, spec: jax.P) -> int:
        return math.prod(NamedSharding(mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(held, shapes, specs))) / 2**20
