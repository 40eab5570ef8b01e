"""Measured times of each kind of step on a machine, from `benchmarks.step`."""

import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping

from onebit_jax.plan.optimizers import BFLOAT16, FLOAT32, Optimizer, rows

ADAM_ALONE = "Adam, no exchange"

# What reading the file of another program may end in.
_FOREIGN = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError


def _kinds(optimizers: Iterable[Optimizer], warmup_bits: int) -> frozenset[str]:
    return frozenset({ADAM_ALONE}.union(*(row.kinds(warmup_bits) for row in optimizers)))


def calibrated_kinds() -> frozenset[str]:
    """All kinds of ``benchmarks.step`` that a plan reads."""
    return _kinds((FLOAT32, BFLOAT16, *rows()), warmup_bits=32)


def read_calibration(path: pathlib.Path) -> dict[str, float]:
    """Reads what ``python -m benchmarks.step`` wrote.

    Args:
      path: its JSON file.

    Returns:
      Median seconds an element of each kind of step.

    Raises:
      ValueError: for a file that is missing or was not written by that program.
    """
    mend = "Make one with: python -m benchmarks.step --json FILE"
    if not isinstance(path, (str, pathlib.Path)):
        raise ValueError(f"calibration={path!r} must be the path of a file. {mend}.")
    path = pathlib.Path(path)
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        elements = int(figures["elements"])
        return {
            kind: statistics.median(map(float, figure["seconds"])) / elements
            for kind, figure in figures["kinds"].items()
        }
    except OSError as error:
        raise ValueError(
            f"calibration={str(path)!r} cannot be read ({error.strerror}). {mend}."
        ) from None
    except _FOREIGN as error:
        raise ValueError(
            f"calibration={str(path)!r} is no record of benchmarks.step ({error!r}): expected "
            f"figures.elements and figures.kinds[...].seconds. {mend}."
        ) from None


def check(calibration: Mapping[str, float], warmup_bits: int) -> None:
    """Raises ``ValueError`` if a kind that the advice needs is missing, or takes no time."""
    compared = (FLOAT32, BFLOAT16, *(row for row in rows() if row.advised))
    if missing := sorted(_kinds(compared, warmup_bits) - calibration.keys()):
        raise ValueError(
            f"calibration has the kinds {sorted(calibration)}, but needs {missing} too. Make a new "
            f"one with: python -m benchmarks.step --json FILE."
        )
    for kind in sorted(calibrated_kinds() & calibration.keys()):
        value = calibration[kind]
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(
                f"calibration[{kind!r}]={value!r} must be above 0 and finite, in seconds an "
                f"element."
            )
