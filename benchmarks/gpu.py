"""Times the encoding of 1-bit Adam on a GPU, against what its memory can do.

    python -m benchmarks.gpu

What a step does around its exchange is bounded by memory. So each program is given as GB/s, every
argument read once and every result written once, and as a share of what a plain copy reaches on
the same card. A program that goes over memory twice reaches half of it.

- encode: the worker's stage of EC1: adds the residual, finds the scale, packs the signs;
- decode: makes numbers of the received bits and applies them to the parameters;
- Adam: the dense update and its application, for comparison.

Programs take turns, and each turn makes several calls before it waits, so that starting a kernel is
not what is timed.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from benchmarks import tasks
from onebit_jax.collectives.layout import pack_flags, scaled_signs, unpack_flags
from onebit_jax.collectives.one_bit import per_tensor, residual
from train import record


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    elements: int = 2**26
    """Elements of the matrix that is encoded and decoded, a power of two."""
    rounds: int = 15
    """How often the programs take turns."""
    calls: int = 20
    """Calls in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/gpu.json")
    """File to write the figures to."""


class Timed:
    """A compiled program whose results take the place of its first argument, call after call.

    Args:
      function: `function(carried, fixed)` gives the next `carried` and whatever else it writes.
      carried: arrays that the program writes over; donated.
      fixed: arrays that it only reads.
    """

    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], carried: Any, fixed: Any):
        self._compiled = jax.jit(function, donate_argnums=0).lower(carried, fixed).compile()
        self._carried, self._fixed = carried, fixed
        sizes = self._compiled.memory_analysis()
        assert sizes is not None, "XLA for CPUs and GPUs says what memory its programs take"
        self.bytes = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        self.seconds(calls=1)

    def seconds(self, calls: int) -> float:
        """Seconds a call."""
        jax.block_until_ready(self._carried)
        start = time.perf_counter()
        for _ in range(calls):
            self._carried, written = self._compiled(self._carried, self._fixed)
        jax.block_until_ready((self._carried, written))
        return (time.perf_counter() - start) / calls


def encode(
    value: jax.Array, compensated: jax.Array, scale: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The worker's stage of EC1 for one tensor, whose first axis is a multiple of 8.

    Args:
      value: what the worker sends.
      compensated: the last call's `c`, `[1, *shape]`.
      scale: the last call's scale, `[1]`.
      active: which elements take part, packed; uint8 `[1, shape[0] / 8, ...]`.

    Returns:
      The new compensated value, its scale and its packed signs.
    """
    takes_part = unpack_flags(active, axis=1).reshape(compensated.shape)
    made = jnp.where(takes_part, value + residual(compensated, scale), 0.0)
    squares = jnp.sum(made * made).reshape(1)
    c = lax.optimization_barrier(made)
    packed = pack_flags(c.reshape(1, 8, *active.shape[1:]) >= 0, axis=1)
    return c, jnp.sqrt(squares / value.size), packed


def decode(
    params: jax.Array, packed: jax.Array, scales: jax.Array, inverse_root: jax.Array
) -> jax.Array:
    """Applies received bits to the parameters, over a frozen variance."""
    signs = scaled_signs(packed, per_tensor(scales, packed)[:, None], axis=1)
    return params - 1e-4 * signs.reshape(params.shape) * inverse_root


def timed_programs(shape: tuple[int, ...]) -> dict[str, Timed]:
    """The programs that are bounded by memory; the copy first, which others are compared with."""
    packed = jnp.full((1, shape[0] // 8, *shape[1:]), 255, jnp.uint8)
    scales = jnp.full((1,), 1e-3)
    adam = optax.adam(1e-4)

    def full(value: float) -> jax.Array:
        return jnp.full(shape, value)

    def encode_again(carried: Any, fixed: Any) -> Any:
        (c, scale), (value, active) = carried, fixed
        c, scale, packed = encode(value, c, scale, active)
        return (c, scale), packed

    def apply_again(params: Any, fixed: Any) -> Any:
        packed, scales, inverse_root = fixed
        return decode(params, packed, scales, inverse_root), ()

    def adam_again(carried: Any, grads: Any) -> Any:
        params, state = carried
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), ()

    return {
        # Changes its values, lest XLA leave it out or have the copy engine do it; and in place, as
        # the others are, lest new pages be what is timed.
        "copy": Timed(lambda x, _: (-x, ()), full(0.5), ()),
        "encode": Timed(encode_again, (full(0.0)[None], jnp.zeros(1)), (full(1e-3), packed)),
        "decode": Timed(apply_again, full(0.5), (packed, scales, full(1.0))),
        "Adam": Timed(adam_again, (full(0.5), adam.init(full(0.5))), full(1e-3)),
    }


def measure(options: Options) -> dict[str, Any]:
    """Times everything on the first device, whatever it is."""
    programs = timed_programs(tasks.matrices(options.elements)[0].shape)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, program in programs.items():
            seconds[name].append(program.seconds(options.calls))
    rates = {name: x.bytes / statistics.median(seconds[name]) for name, x in programs.items()}
    return {
        name: {
            "seconds": seconds[name],
            "bytes": program.bytes,
            "GB/s": rates[name] / 1e9,
            "of copy": rates[name] / rates["copy"],
        }
        for name, program in programs.items()
    }


def main(options: Options) -> None:
    """Runs the benchmark."""
    figures = measure(options)
    print(f"{jax.devices()[0].device_kind}, {options.elements:,} elements")
    print(f"{'':16}{'ms':>9}{'bytes per element':>18}{'GB/s':>9}{'of copy':>9}")
    for name, figure in figures.items():
        milliseconds = 1e3 * statistics.median(figure["seconds"])
        size = figure["bytes"] / options.elements
        print(f"{name:16}{milliseconds:9.3f}{size:18.2f}", end="")
        print(f"{figure['GB/s']:9.1f}{figure['of copy']:9.1%}")
    packages = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    record.write(options.json, options, {"memory": figures}, *packages)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
