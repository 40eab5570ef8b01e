"""Times sources of random bits: JAX's generators, and the hash that Birder draws its signs with.

    python -m benchmarks.random_bits

A draw takes 16 bits, so that a word of 32 serves two elements where the source has no narrower one.
The hash is timed as it is used, drawing and packing in one loop, beside packing alone.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import tyro
from jax import lax

from onebit_jax.collectives.packing import pack
from onebit_jax.collectives.random_signs import Ratio, binarize, uniforms
from train import record


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    elements: int = 2**22
    """Elements to draw for, a multiple of 8."""
    rounds: int = 15
    """How often the sources take turns."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/random_bits.json")
    """File to write the figures to."""


def check(options: Options) -> None:
    """Refuses options that mean nothing.

    Raises:
      ValueError: for the first of them.
    """
    if options.elements < 8 or options.elements % 8:
        raise ValueError(f"elements={options.elements} must be a multiple of 8, such as {2**22}.")
    if options.rounds < 1:
        raise ValueError(f"rounds={options.rounds} must be 1 or more: leave it out for 15.")


def sources(elements: int) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """By name, what makes the bits for all elements from a key of two words, and from numbers."""
    plane = (elements // 8,)

    def drawn(key: jax.Array, z: jax.Array) -> jax.Array:
        z = z.reshape(1, 1, 8, *plane)
        drawn = binarize(Ratio(z, jnp.ones_like(z)), uniforms(key, [0], 1, plane))
        return pack(drawn, 1, axis=2)

    def of_jax(implementation: str, dtype: jax.typing.DTypeLike) -> Callable[..., jax.Array]:
        def bits(key: jax.Array, z: jax.Array) -> jax.Array:
            del z
            made = jax.random.key(key[0].astype(jnp.int32), impl=implementation)
            return jax.random.bits(made, (elements * 2 // jnp.dtype(dtype).itemsize,), dtype)

        return bits

    def of_xla(algorithm: lax.RandomAlgorithm, words: int) -> Callable[..., jax.Array]:
        def bits(key: jax.Array, z: jax.Array) -> jax.Array:
            del z
            state = jnp.resize(key, (words,))
            return lax.rng_bit_generator(state, (elements // 2,), algorithm=algorithm)[1]

        return bits

    return {
        "packing alone": lambda key, z: pack(z.reshape(8, *plane) >= 0, 1, axis=0),
        "hash, drawing and packing": drawn,
        "lax.rng_bit_generator, Threefry": of_xla(lax.RandomAlgorithm.RNG_THREE_FRY, 4),
        "lax.rng_bit_generator, Philox": of_xla(lax.RandomAlgorithm.RNG_PHILOX, 4),
        **{
            f"jax.random.bits, {implementation}, {dtype}": of_jax(implementation, dtype)
            for implementation in ("threefry2x32", "rbg", "unsafe_rbg")
            for dtype in ("uint16", "uint32")
        },
    }


def main(options: Options) -> None:
    """Runs the benchmark."""
    check(options)
    programs = {name: jax.jit(source) for name, source in sources(options.elements).items()}
    z = jnp.linspace(-1, 1, options.elements)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(-1, options.rounds):
        key = jnp.array([turn + 1, 7], jnp.uint32)
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(key, z))
            # The first turn compiles.
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    print(f"{options.elements:,} elements; nanoseconds per element, median and least")
    for name, taken in seconds.items():
        median, least = (1e9 * f(taken) / options.elements for f in (statistics.median, min))
        print(f"{name:44}{median:9.2f}{least:9.2f}")
    record.write(options.json, options, seconds)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
