"""How long each kind of step takes on a machine, as `benchmarks.step` has measured it."""

import json
import math
import pathlib
import statistics
from collections.abc import Mapping

from onebit_jax.plan.optimizers import BFLOAT16, FLOAT32, ONEBIT

ADAM_ALONE = "Adam, no exchange"
CALIBRATED_KINDS = frozenset(
    {ADAM_ALONE}
    | {row.benchmark for row in (FLOAT32, BFLOAT16, *ONEBIT)}
    | {f"{row.benchmark}, warm-up" for row in ONEBIT if row.warmup}
)


def read_calibration(path: pathlib.Path) -> dict[str, float]:
    """Reads what ``python -m benchmarks.step`` wrote.

    Args:
      path: its JSON file.

    Returns:
      Median seconds an element of each kind of step.

    Raises:
      ValueError: for a file that is missing or is not one of that program's.
    """
    mend = "Make one with: python -m benchmarks.step --json FILE"
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
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"calibration={str(path)!r} is no record of benchmarks.step ({error!r}): expected "
            f"figures.elements and figures.kinds[...].seconds. {mend}."
        ) from None


def check(calibration: Mapping[str, float]) -> None:
    """Raises ``ValueError`` for a calibration that lacks a kind, or has one that takes no time."""
    if missing := sorted(CALIBRATED_KINDS - calibration.keys()):
        raise ValueError(
            f"calibration has the kinds {sorted(calibration)}, but needs {missing} too. Make a new "
            f"one with: python -m benchmarks.step --json FILE."
        )
    for kind in sorted(CALIBRATED_KINDS):
        value = calibration[kind]
        if not 0 < value < math.inf:
            raise ValueError(
                f"calibration[{kind!r}]={value!r} must be above 0 and finite, in seconds an "
                f"element."
            )
