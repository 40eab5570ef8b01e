"""Stopping a run on SIGTERM or Ctrl-C between two steps, so that it can be saved first."""

import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils


class Stopped(Exception):  # noqa: N818 - it is no error
    """A run was stopped and saved.

    Attributes:
        signal: which one asked for it.
    """

    def __init__(self, optimizer: str, step: int, number: signal.Signals):
        super().__init__(f"{optimizer} stopped after step {step}")
        self.signal = number


class StopRequest:
    """Notes SIGTERM and Ctrl-C while it is entered; a second one interrupts at once.

    With several processes JAX's own service notes SIGTERM, and lets all agree on the step. In
    another thread than the main one, which alone may handle signals, nothing is noted.
    """

    def __init__(self) -> None:
        self.signal = signal.SIGTERM
        self._noted = False

    def __enter__(self) -> "StopRequest":
        is_main = threading.current_thread() is threading.main_thread()
        own = is_main and jax.process_count() == 1
        signals = (signal.SIGTERM, signal.SIGINT) if own else ()
        self._before = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after step `step`; the same on all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._noted

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._noted:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._noted = True
