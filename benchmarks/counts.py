"""The check of options that say how often something is measured."""

import sys
from typing import Any


def check_counts(options: Any, *names: str) -> None:
    """Ends the program with exit code 2 for a number below 1, before anything is compiled."""
    for name in names:
        value = getattr(options, name)
        if min(value, default=1) < 1 if isinstance(value, tuple) else value < 1:
            option = name.replace("_", "-")
            print(f"error: --{option} {value}: expected whole numbers from 1", file=sys.stderr)
            raise SystemExit(2)
