"""What brings Muon on gradients of one bit nearer to dense Muon, on a language model.

    python -m benchmarks.muon_bits --corpus TEXTS --workers 4 --steps 400 --out runs/muon-bits
    python -m train.compare --help                                       # has the other options

Compared with Adam and dense Muon: 4, 2 and 1 bits; with one bit residuals that do not decay, that
decay less or are left out altogether, a longer momentum, the embedding by Muon rather than by Adam;
the momentum in the gradients' place; and with two bits residuals that do not decay, or less. All
at the learning rate that suits dense Muon best.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

import onebit_jax
from train.registry import Entry, Setting
from train import compare
from train.optimizers import OPTIMIZERS


def muon(
    exchange: Callable[[str], optax.GradientTransformation],
    beta: float = 0.95,
    *,
    nesterov: bool = True,
    embedding: bool = False,
) -> Callable[[Setting], optax.GradientTransformation]:
    """As `onebit_jax.onebit_muon`, with any exchange of the matrices' gradients.

    Args:
        exchange: makes it, for an axis.
        beta: decay of the momentum.
        nesterov: of Muon.
        embedding: whether Muon has the embedding too, or Adam.
    """

    def make(setting: Setting) -> optax.GradientTransformation:
        matrices = optax.contrib.muon(
            setting.learning_rate,
            beta=beta,
            nesterov=nesterov,
            weight_decay=setting.weight_decay,
            consistent_rms=0.2,
        )
        rest = optax.adam(setting.learning_rate, setting.b1, setting.b2, nesterov=True)
        axis = setting.axis_name

        def parts(params: Any) -> Any:
            def part(path: Any, p: Any) -> str:
                matrix = p.ndim == 2 and (embedding or path[-1].key != "embedding")
                return "muon" if matrix else "adam"

            return jax.tree_util.tree_map_with_path(part, params)

        return optax.partition(
            {
                "muon": optax.chain(exchange(axis), matrices),
                "adam": optax.chain(onebit_jax.compressed_mean(axis, 2), rest),
            },
            parts,
        )

    return make


class MomentumState(NamedTuple):
    """State of :func:`compressed_momentum`, equal on all workers but for what says otherwise.

    Attributes:
        m: the momentum, like the parameters.
        exchange: of the compressed mean.
    """

    m: Any
    exchange: Any


def compressed_momentum(axis_name: str, beta: float = 0.95) -> optax.GradientTransformation:
    """``m <- EC1(beta m + g_i)``: what travels is the momentum, as in 1-bit Adam."""
    mean = onebit_jax.compressed_mean(axis_name)

    def init(params: Any) -> MomentumState:
        return MomentumState(optax.tree.zeros_like(params), mean.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MomentumState]:
        del params
        own = jax.tree.map(lambda m, g: beta * m + g, state.m, updates)
        m, exchange = mean.update(own, state.exchange)
        return m, MomentumState(m, exchange)

    return optax.GradientTransformation(init, update)


def mean_at(bits: int, decay: float = 0.5) -> Callable[[str], optax.GradientTransformation]:
    """A compressed mean, as `onebit_jax.onebit_muon` has it, with residuals that decay."""
    exchange = onebit_jax.ExchangeOptions(scale="mean_abs" if bits == 1 else "rms")
    return lambda axis_name: onebit_jax.compressed_mean(
        axis_name, bits, residual_decay=decay, exchange=exchange
    )


VARIANTS: dict[str, Entry] = {
    name: Entry(label, 8e-3, make, "compression", rate_of="muon")
    for name, label, make in (
        ("decay_1", "1 bit, all of the residuals", muon(mean_at(1, 1.0))),
        ("decay_0.9", "1 bit, 0.9 of the residuals", muon(mean_at(1, 0.9))),
        ("decay_0", "1 bit, no residuals", muon(mean_at(1, 0.0))),
        ("beta_0.98", "1 bit, momentum 0.98", muon(mean_at(1), 0.98)),
        ("embedding", "1 bit, embedding by Muon", muon(mean_at(1), embedding=True)),
        ("2_decay_1", "2 bits, all of the residuals", muon(mean_at(2, 1.0))),
        ("2_decay_0.9", "2 bits, 0.9 of the residuals", muon(mean_at(2, 0.9))),
        ("momentum", "1 bit of the momentum", muon(compressed_momentum, 0.0, nesterov=False)),
    )
}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and returns its exit code."""
    OPTIMIZERS.update(VARIANTS)
    names = ["adam", "muon", "onebit_muon", "onebit_muon_2", "onebit_muon_1", *VARIANTS]
    return compare.main(["--task", "lm", "--optimizers", *names, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
