"""One run at a time in an output folder."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder, which is made, until the block ends or the process does.

    The lock is on an open file beside the folder, so that a killed run leaves none behind.

    Raises:
        ValueError: another run holds the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file after it was opened here.
            held = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except BlockingIOError:
            held = False
        if not held:
            raise ValueError(
                f"--out {folder}: another run is training there; wait for it, or give another --out"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
