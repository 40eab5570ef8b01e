"""How much of a run's time is compute, over the bandwidth and the steps between exchanges."""

from collections.abc import Sequence
from typing import NamedTuple

from onebit_jax.plan.model import Setting, check, covered, predict
from onebit_jax.plan.optimizers import BFLOAT16, FLOAT32, local_steps, rows
from onebit_jax.plan.quantities import format_rate, format_table

# Bit/s: from links between sites to those within one.
BANDWIDTHS = (50e6, 100e6, 200e6, 500e6, 1e9, 2e9, 5e9, 10e9)
# Steps from one exchange to the next, as published for DiLoCo.
EVERY = (1, 8, 32, 128)


class Utilization(NamedTuple):
    """The share of a step's time, after any warm-up, in which devices compute.

    Attributes:
      bandwidths: of the columns, bit/s.
      rows: by the optimizer's name, its share at each bandwidth, in (0, 1].
    """

    bandwidths: tuple[float, ...]
    rows: dict[str, tuple[float, ...]]


def utilization(
    setting: Setting, bandwidths: Sequence[float] = BANDWIDTHS, every: Sequence[int] = EVERY
) -> Utilization:
    """Predicts compute utilization with dense Adam, 1-bit Adam, and local steps.

    Args:
      setting: the run and the machines; its bandwidth is not used, nor its ``every``.
      bandwidths: of a node's card, bit/s.
      every: steps from one exchange of local steps to the next; they exchange float32, and
        ``local_bits`` bits per value.

    Raises:
      ValueError: as :func:`onebit_jax.plan.plan`.

    >>> setting = Setting(
    ...     parameters=10**9, workers=8, bandwidth=1e9, step_time=1.0, steps=10**5, overlap=0.0
    ... )
    >>> shares = utilization(setting, bandwidths=[100e6, 10e9]).rows
    >>> [round(x, 2) for x in shares["dense float32"]], [round(x, 2) for x in shares["1-bit Adam"]]
    ([0.0, 0.15], [0.05, 0.84])
    """
    settings = [setting._replace(bandwidth=bandwidth) for bandwidth in bandwidths]
    for at in settings:
        check(at)
    # Of 1-bit Adam the faster of its forms.
    compared = {"dense float32": [FLOAT32], "dense bfloat16": [BFLOAT16]}
    compared["1-bit Adam"] = [row for row in rows() if row.advised]
    for bits in dict.fromkeys((32, setting.local_bits)):
        compared |= {row.name: [row] for row in (local_steps(steps, bits) for steps in every)}
    compared = {name: covered(forms, setting) for name, forms in compared.items()}
    shares = {
        name: tuple(at.step_time / min(predict(x, at).step for x in forms) for at in settings)
        for name, forms in compared.items()
        if forms
    }
    return Utilization(tuple(bandwidths), shares)


def utilization_table(shares: Utilization) -> str:
    """Plain text, in percent."""
    rows = [["compute utilization", *map(format_rate, shares.bandwidths)]]
    rows += [[name, *(f"{x:.0%}" for x in row)] for name, row in shares.rows.items()]
    return "\n".join(format_table(rows))
