"""What it costs to apply every update one step late, which would hide the whole exchange.

    python -m benchmarks.delay --corpus TEXTS --workers 4 --steps 2000 --sweep 3 --out runs/delay
    python -m train.compare --help                                       # has the other options

Adam, Muon, Muon at 4 bits and 1-bit Muon, each in time, one step late, and one step late with a
correction. Every row has a sweep of its own. A late update is made of gradients at the parameters
before the last update, as when messages travel beside the next step's gradients; here they are
held back after the exchange, which hides nothing. `onebit_muon_delayed` and `onebit_muon_1_delayed`
are `onebit_jax.onebit_muon(delay=1)`, which hides it: the same but for the first update.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from train.registry import Entry, Setting
from train import compare
from train.optimizers import OPTIMIZERS

IN_TIME = ("adam", "muon", "onebit_muon", "onebit_muon_1")
DELAYED = ("onebit_muon_delayed", "onebit_muon_1_delayed")


class LateState(NamedTuple):
    """State of :func:`one_step_late`, equal on all workers but for what ``inner`` says.

    Attributes:
        held: the last update, which the next step applies, like the parameters.
        applied: the update before it, which was applied last, like the parameters.
        inner: of the optimizer.
    """

    held: Any
    applied: Any
    inner: Any


def one_step_late(
    inner: optax.GradientTransformation, *, corrected: bool
) -> optax.GradientTransformation:
    """Applies ``u_{t-1}`` in step ``t``, or ``2 u_{t-1} - u_{t-2}`` with a correction.

    The correction is error feedback on whole updates: ``u_{t-1}`` is what step ``t - 1`` should
    have applied, had it been there in time, and ``u_{t-2}`` what it did apply; their difference is
    added to the next step.

    Args:
        inner: the optimizer.
        corrected: whether to correct.
    """

    def init(params: Any) -> LateState:
        nothing = optax.tree.zeros_like(params)
        return LateState(nothing, nothing, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, LateState]:
        made, inner_state = inner.update(updates, state.inner, params)
        late = state.held
        if corrected:
            late = jax.tree.map(lambda u, before: 2 * u - before, state.held, state.applied)
        return late, LateState(made, state.held, inner_state)

    return optax.GradientTransformation(init, update)


def late(entry: Entry, *, corrected: bool) -> Entry:
    """The same optimizer one step late, with a sweep of its own."""

    def make(setting: Setting) -> optax.GradientTransformation:
        return one_step_late(entry.make(setting), corrected=corrected)

    label = f"{entry.label}, late, corrected" if corrected else f"{entry.label}, late"
    return entry._replace(label=label, make=make, rate_of=None)


def variants() -> dict[str, Entry]:
    """Each optimizer in time with a sweep of its own, late, and late with a correction."""
    rows: dict[str, Entry] = {}
    for name in IN_TIME:
        entry = OPTIMIZERS[name]
        rows[name] = entry._replace(rate_of=None)
        rows[f"{name}_late"] = late(entry, corrected=False)
        rows[f"{name}_late_corrected"] = late(entry, corrected=True)
    return rows | {name: OPTIMIZERS[name]._replace(rate_of=None) for name in DELAYED}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and returns its exit code."""
    rows = variants()
    OPTIMIZERS.update(rows)
    return compare.main(["--task", "lm", "--optimizers", *rows, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
