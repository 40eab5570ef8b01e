"""Traces of a run's steps by JAX's profiler."""

import pathlib
from typing import Any

import jax

_STEPS = 3
# After a step that was compiled, the next one's program is read for what it sends.
_PAUSE = 2


class Profiler:
    """Traces three steps after each time that a step was compiled; a context manager.

    Args:
        folder: where a folder `step-N` for each trace is made, N the first step in it; None for no
            traces.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder = folder
        self._pause = 0
        self._left = 0

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._left:
            jax.profiler.stop_trace()

    def compiling(self) -> None:
        """Says that a step is being compiled."""
        self._pause = _PAUSE

    def dispatched(self, done: int, results: Any) -> None:
        """Says that `done` steps were dispatched, the last with `results`; begins or ends a trace.

        Either waits for the step.
        """
        if self._folder is None:
            return
        if self._left:
            self._left -= 1
            if not self._left:
                jax.block_until_ready(results)
                jax.profiler.stop_trace()
        if self._pause:
            self._pause -= 1
            if not self._pause and not self._left:
                jax.block_until_ready(results)
                jax.profiler.start_trace(str(self._folder / f"step-{done + 1}"))
                self._left = _STEPS
