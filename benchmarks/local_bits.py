"""What bits cost local steps when there are many exchanges, on a language model.

    python -m benchmarks.local_bits --corpus TEXTS --workers 8 --steps 2000 --out runs/local-bits
    python -m train.compare --help                                       # has the other options

Adam on every worker for itself, averaged every 6 steps, 333 times in 2,000, at 32, 4, 2 and 1 bits;
at one bit also with residuals of which half is kept.
"""

import sys
from collections.abc import Sequence

from train.registry import Entry, local
from train import compare
from train.optimizers import OPTIMIZERS

EVERY = 6

VARIANTS: dict[str, Entry] = {
    "every_6": local("Every 6 steps, float32", 32, EVERY),
    "every_6_4": local("Every 6 steps, 4 bits", 4, EVERY),
    "every_6_2": local("Every 6 steps, 2 bits", 2, EVERY),
    "every_6_1": local("Every 6 steps, 1 bit", 1, EVERY),
    "every_6_1_decay": local("Every 6 steps, 1 bit, decay 0.5", 1, EVERY, error_decay=0.5),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison and returns its exit code."""
    OPTIMIZERS.update(VARIANTS)
    return compare.main(["--task", "lm", "--optimizers", *VARIANTS, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
