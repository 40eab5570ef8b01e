"""Trying learning rates: which ones, and where the trainings are kept."""

import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from train.compare_options import Options


class Folder:
    """The output folder: every training that was made, in a file of its own.

    Raises:
        ValueError: it holds trainings that cannot be compared with these, or something else.
    """

    def __init__(self, options: Options):
        self.path = pathlib.Path(options.out)
        settings = self.path / "options.json"
        if settings.exists():
            earlier = json.loads(settings.read_text(encoding="utf-8"))
            for option, value in options.trajectory().items():
                if earlier.get(option) != value:
                    raise ValueError(
                        f"--out {self.path}: holds trainings with --{option.replace('_', '-')} "
                        f"{earlier.get(option)}, these have {value}; give the same, or another "
                        "--out"
                    )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"--out {self.path}: exists and is no comparison; give another folder")
        self._options = options

    def create(self) -> None:
        """Makes the folder, once nothing is wrong with the input."""
        (self.path / "trainings").mkdir(parents=True, exist_ok=True)
        _write(self.path / "options.json", self._options.trajectory())

    def training(
        self, name: str, steps: int, rate: float, seed: int, make: Callable[[], dict[str, Any]]
    ) -> Any:
        """The record of a training, which is made unless it is there."""
        path = self.path / "trainings" / f"{name}-{steps}-{rate:g}-{seed}.json"
        if not path.exists():
            start = time.perf_counter()
            made = make()
            _write(path, made)
            took = time.perf_counter() - start
            loss = "diverged" if made["heldout"] is None else f"{made['heldout']:.4f}"
            of = f"{name}, {steps} steps, learning rate {rate:g}, seed {seed}"
            print(f"{of}: {loss} in {took:.0f} s", flush=True)
        return json.loads(path.read_text(encoding="utf-8"))


def _write(path: pathlib.Path, value: Any) -> None:
    # Renamed into place: what is there is whole.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value) + "\n", encoding="utf-8")
    part.rename(path)


def sweep(
    first: Sequence[float], widen: int, heldout: Callable[[float], float | None]
) -> dict[float, float]:
    """Tries learning rates, and more of them while the best is the lowest or the highest.

    Args:
        first: the learning rates to try in any case.
        widen: how many more at most; each is twice the highest, or half of the lowest.
        heldout: makes a training; its loss, None where it diverged.

    Returns:
        The losses by learning rate, in rising order; infinite where a training diverged.
    """
    losses = {rate: or_infinite(heldout(rate)) for rate in sorted(first)}
    for _ in range(widen):
        best, lowest, highest = min(losses, key=losses.__getitem__), min(losses), max(losses)
        if best not in (lowest, highest):
            break
        rate = lowest / 2 if best == lowest else 2 * highest
        losses[rate] = or_infinite(heldout(rate))
    return dict(sorted(losses.items()))


def or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def or_infinite(value: float | None) -> float:
    """A loss of a record, infinite where the training diverged."""
    return math.inf if value is None else value
