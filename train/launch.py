"""Starting and stopping a run: its processes, what must be alike in them, and signals."""

import json
import pathlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.config import RunConfig

_MARK = ".seen-by-all-processes"
_LOOK_SECONDS = 10.0


def join(config: RunConfig) -> int:
    """Starts JAX in all processes of a run, whose number it returns.

    A process that fails says why and waits, at its exit, for the others; JAX ends all of them with
    SIGABRT, which is exit code 134 in a shell, if they do not come within `process_timeout`.
    """
    if config.coordinator is None:
        return 1
    found, timeout = config.coordinator == "auto", config.process_timeout
    place = {
        "coordinator_address": config.coordinator,
        "num_processes": config.processes,
        "process_id": config.process_id,
    }
    # Where one does not come, JAX says neither that nor where it waited.
    where = "the address that JAX finds" if found else config.coordinator
    print(f"waiting for all processes at {where}, for {timeout} s", file=sys.stderr, flush=True)
    jax.distributed.initialize(
        **({} if found else place),
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=timeout // 3,
        shutdown_timeout_seconds=timeout,
    )
    # `jax.process_count` starts the devices, whose number is not set yet.
    return jax.process_count() if found else config.processes


def agree(values: Mapping[str, str]) -> None:
    """Compares values over the processes, by name; waits for all of them.

    Raises:
        ValueError: on all processes, naming the first that differs.
    """
    own = json.dumps(dict(values)).encode()
    longest = int(multihost_utils.process_allgather(np.int32(len(own))).max())
    letters = np.frombuffer(own.ljust(longest), np.uint8)
    said = [json.loads(row.tobytes()) for row in multihost_utils.process_allgather(letters)]
    for index, other in enumerate(said):
        for name in said[0] | other:
            first, own_value = said[0].get(name, "nothing"), other.get(name, "nothing")
            if first != own_value:
                raise ValueError(
                    f"{name}: {first} on process 0, {own_value} on process {index}; "
                    "give all processes the same"
                )


def check_shared(folder: pathlib.Path) -> None:
    """Makes sure that all processes see the folder that process 0 has made.

    Raises:
        ValueError: they do not.
    """
    mark = folder / _MARK
    first = jax.process_index() == 0
    if first:
        mark.write_text(secrets.token_hex(8), encoding="utf-8")
    multihost_utils.sync_global_devices(_MARK)
    # A folder of a network may show late what was written elsewhere.
    deadline = time.monotonic() + _LOOK_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS / 50)
    seen = mark.read_text(encoding="utf-8") if mark.exists() else "nothing"
    name = "--out must be one folder for all processes, on a disk that they share; a mark in it"
    agree({name: seen})
    if first:
        mark.unlink()


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
