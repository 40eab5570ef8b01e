"""A process of a group: it tells process 0 how it fares, and ends when it hears that one failed."""

import contextlib
import linecache
import os
import pathlib
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Self

from onebit_jax.training.process_connections import Line, connect, listen
from onebit_jax.training.process_hub import GONE, LATE_SECONDS, Hub
from onebit_jax.training.process_messages import FAILED, as_said, check_same, shortened

# What a process fails with may follow from the end of another one, of which it hears within this.
_NEWS_SECONDS = 3.0
# How often a process looks at the time of its last call of `progress`, at least.
_WATCH_SECONDS = 5.0
# Process 0 waits so long until all others have read why they end.
_LEAVING_SECONDS = 10.0
# Modules in which a process waits on behalf of the loop that calls them.
_LIBRARIES = {"jax", "jaxlib", "optax", "flax", "orbax", "onebit_jax", *sys.stdlib_module_names}


class RefusedError(ValueError):
    """The processes cannot work together; all of them are told the same."""


class ProcessGroup:
    """The processes of a run, as one of them sees it: what :func:`process_group` gives.

    Attributes:
      num_processes: the number of processes.
      process_id: which of them this one is, from 0.
    """

    def __init__(self, num_processes: int = 1, process_id: int = 0):
        self.num_processes, self.process_id = num_processes, process_id
        self._calls, self._last = 0, time.monotonic()

    def progress(self) -> None:
        """Notes that this process goes on. Call it once a step; it costs nothing."""
        self._calls, self._last = self._calls + 1, time.monotonic()

    def agree(self, same: Mapping[str, str]) -> None:
        """Waits for all processes, and compares what they give.

        Args:
          same: values under names, the same on all processes.

        Raises:
          ValueError: on all processes, naming what differs and who has which value; for what is
            no text.
        """
        check_same(same)


class Member(ProcessGroup):
    """One of several processes; a context manager, which all leave together.

    Args:
      address: HOST:PORT of process 0.
      num_processes: the number of processes, 2 or more.
      process_id: which of them this one is.
      timeout: seconds in which all must come.
      stall_timeout: as of :func:`process_group`.
      exit_status: likewise.

    Raises:
      ValueError: process 0 was not found, or cannot listen.
    """

    def __init__(
        self,
        address: str,
        num_processes: int,
        process_id: int,
        timeout: float,
        stall_timeout: float | None,
        exit_status: Callable[[BaseException], tuple[int, str] | None],
    ):
        super().__init__(num_processes, process_id)
        self._address, self._stall_timeout, self._exit_status = address, stall_timeout, exit_status
        self._thread = threading.get_ident()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over, self._left, self._sending = False, threading.Event(), threading.Lock()
        host, _, port = address.rpartition(":")
        listening = listen(address, int(port)) if process_id == 0 else None
        self._hub = Hub(listening, num_processes, timeout, stall_timeout) if listening else None
        self._line = Line(connect(host.strip("[]"), int(port), timeout))
        # Within this time all have come and said what the first answer depends on.
        self._line.connection.settimeout(2 * timeout + LATE_SECONDS)
        self._line.send(id=process_id, count=num_processes, host=socket.gethostname())
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Self:
        if self._stall_timeout is not None:
            threading.Thread(target=self._watch, args=[self._stall_timeout], daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._left.set()
        while True:
            try:
                self._leave(error)
                break
            except KeyboardInterrupt as interrupt:
                # If it left this block, JAX's own end would wait for the others.
                error = interrupt
        self._over = True
        self._send(done=True)
        self._close()

    def agree(self, same: Mapping[str, str]) -> None:
        """As of :class:`ProcessGroup`."""
        check_same(same)
        self._send(said=as_said(same))
        self._await_answer()

    def _leave(self, error: BaseException | None) -> None:
        """Waits until all processes leave; ends this one if it failed alone."""
        if isinstance(error, RefusedError):
            return
        status = None if error is None else self._exit_status(error)
        if error is not None and status is not None:
            self._fail(error, *status)
        self._send(left=self._calls)
        self._await_answer()

    def _await_answer(self) -> None:
        if refused := self._answers.get():
            raise RefusedError(refused)

    def _send(self, **message: object) -> None:
        with self._sending:  # several threads do
            self._line.send(**message)

    def _fail(self, error: BaseException, code: int, text: str) -> None:
        """Ends the process: JAX's own end would wait for the others."""
        self.progress()  # lest the others take the wait for a stall
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends the wait
            time.sleep(_NEWS_SECONDS)
        self._over = True
        if code == FAILED and isinstance(error, Exception):
            traceback.print_exception(error)
        else:
            print(text, file=sys.stderr)
        self._send(stopped=shortened(text.removeprefix("error: ")), code=code)
        self._exit(code)

    def _watch(self, stall_timeout: float) -> None:
        """Tells process 0 when there is no progress."""
        while not self._left.wait(min(stall_timeout / 10, _WATCH_SECONDS)):
            if time.monotonic() - self._last >= stall_timeout:
                self._send(stalled=True)

    def _listen(self) -> None:
        met = False
        while message := self._line.receive():
            met = True
            self._line.connection.settimeout(None)
            if "report" in message:
                seconds, line = time.monotonic() - self._last, _line_of(self._thread)
                self._send(calls=self._calls, seconds=seconds, line=line)
            elif "end" in message:
                self._end(message["end"], message["code"])
            else:
                self._over = self._over or "refused" in message
                self._answers.put(message.get("refused"))
        if not met:
            self._answers.put(
                f"coordinator {self._address}: what answers there is not process 0 of this run, "
                "or a run that began already; give another port, or end what has it"
            )
        elif not self._over:
            self._end(f"process 0 stopped: {GONE}", FAILED)

    def _end(self, text: str, code: int) -> None:
        """Says why, and ends the process: its main thread may wait for the others for ever."""
        # A progress bar may have left its line unfinished.
        print(f"\nerror: {text}", file=sys.stderr)
        self._exit(code)

    def _exit(self, code: int) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            self._close()
        finally:
            os._exit(code)

    def _close(self) -> None:
        """Ends the connection; process 0 waits a little until all others have read why."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._line.connection.shutdown(socket.SHUT_RDWR)
        if self._hub is not None:
            self._hub.join(_LEAVING_SECONDS)


def _line_of(thread: int) -> str:
    """The line of the user's own program that a thread executes."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "the end of its thread"
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()
    return shortened(f"{pathlib.Path(path).name}:{number}" + (f" ({text})" if text else ""))
