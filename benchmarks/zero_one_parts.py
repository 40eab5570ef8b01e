"""What parts 0/1 Adam from Adam on a language model: the frozen variance, the bits or the gaps.

    python -m benchmarks.zero_one_parts --corpus TEXTS --workers 4 --steps 800 --out runs/zero-one
    python -m train.compare --help                                       # has the other options

1-bit Adam with a frozen variance exchanges one bit in every update after its warm-up; so does 0/1
Adam with gaps of 1, whose momentum is otherwise its own. Then the gaps between its exchanges may
grow to 2, and as far as they do by default, which is what `zero_one_adam` names in `train/`.
"""

import sys
from collections.abc import Sequence

from train.registry import Entry, zero_one
from train import compare
from train.optimizers import OPTIMIZERS

VARIANTS: dict[str, Entry] = {
    "zero_one_adam_1": zero_one("0/1 Adam, gaps of 1", 5e-4, local_step_clipper=1),
    "zero_one_adam_2": zero_one("0/1 Adam, gaps up to 2", 5e-4, local_step_clipper=2),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and returns its exit code."""
    OPTIMIZERS.update(VARIANTS)
    rows = "adam", "onebit_adam_frozen", *VARIANTS, "zero_one_adam"
    return compare.main(["--task", "lm", "--optimizers", *rows, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
