"""What a process of a run says to the others, and hears of them: see `train.hub`."""

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from train.hub import BEATS, ENDED, SILENT, Hub

_FAILED = 1  # the exit code where nobody knows better
_NEWS_SECONDS = 3.0
_RETRY_SECONDS = 0.2


class RefusedError(ValueError):
    """The processes cannot work together; all of them are told the same."""


class Meeting:
    """A process among others; a context manager, which all leave together.

    While it is entered, a process that fails, dies or hangs ends all others: they say which one it
    was, and exit. What is raised inside is reported to them first.

    Args:
        address: HOST:PORT of process 0.
        index: which process this is, from 0.
        count: how many there are, 2 or more.
        timeout: seconds in which all must come; after a third of them without a sign of life a
            process is given up.
        outcome: the exit code and the message that an exception ends this process with; None for
            an exception that all processes raise together.

    Raises:
        ValueError: process 0 was not found, or cannot listen.
    """

    def __init__(
        self,
        address: str,
        index: int,
        count: int,
        timeout: float,
        outcome: Callable[[BaseException], tuple[int, str] | None],
    ):
        self._index, self._outcome, self._address = index, outcome, address
        self._silence = timeout / 3
        self._changed = threading.Condition()
        self._agreed, self._asked = 0, 0
        self._refused: str | None = None
        self._met = self._last = self._failing = self._over = False
        host, _, port = address.rpartition(":")
        self._hub = None
        if index == 0:
            self._hub = _listening(address, int(port), count, timeout, self._silence)
        self._socket = _connect(host.strip("[]"), int(port), timeout)
        self._socket.settimeout(self._silence)
        self._send({"id": index, "count": count, "host": socket.gethostname()})
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ends = None if error is None or isinstance(error, RefusedError) else self._outcome(error)
        if error is not None and ends is not None:
            self._fail(error, *ends)
        if not self._refused:
            self.agree({}, last=True)
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._hub is not None:
            self._hub.wait_for_the_others()

    def agree(self, said: Mapping[str, str], *, last: bool = False) -> None:
        """Waits for all processes, and makes sure that they say the same.

        Args:
            said: values under names.
            last: whether this process has nothing to say to the others after it.

        Raises:
            RefusedError: they do not, or one of them has not come.
        """
        with self._changed:
            self._asked += 1
            self._last = last
        self._send({"said": dict(said), "last": last})
        with self._changed:
            self._changed.wait_for(lambda: self._refused or self._agreed == self._asked)
            if self._refused:
                raise RefusedError(self._refused)

    def _fail(self, error: BaseException, code: int, text: str) -> None:
        """Ends the process: JAX's own end would wait for the others."""
        # What was raised may follow from what happened to another one, which ends this one too.
        time.sleep(_NEWS_SECONDS)
        self._failing = True
        if code == _FAILED:
            traceback.print_exception(error)
        else:
            print(text, file=sys.stderr)
        sys.stderr.flush()
        self._send({"stopped": text, "code": code})
        with self._changed:
            self._changed.wait_for(lambda: self._over, _NEWS_SECONDS)
        self._exit(code)

    def _listen(self) -> None:
        how = ENDED
        try:
            with self._socket.makefile(encoding="utf-8") as lines:
                for line in lines:
                    self._hear(json.loads(line))
        except TimeoutError:
            how = SILENT.format(self._silence)
        except (OSError, ValueError) as error:
            if not isinstance(error, ConnectionError):
                how = f"was cut off ({error})"
        if not self._met:
            self._refuse(
                f"--coordinator {self._address}: what answers there is not process 0 of this run, "
                "or a run that began already; give another port, or end what has it"
            )
        elif not self._over:
            self._end(f"error: process 0 stopped: it {how}", _FAILED)

    def _hear(self, message: dict[str, Any]) -> None:
        self._met = True
        if "refused" in message:
            self._refuse(message["refused"])
        elif "agreed" in message:
            with self._changed:
                self._agreed += 1
                self._over = self._last
                self._changed.notify_all()
        elif "stopped" in message:
            who = f"process {message['stopped']} on {message['host']}"
            if message["stopped"] != self._index or not self._failing:
                text = message["text"].removeprefix("error: ")
                self._end(f"error: {who} stopped: {text}", message["code"])
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _refuse(self, text: str) -> None:
        with self._changed:
            self._refused = text
            self._over = True
            self._changed.notify_all()

    def _end(self, text: str, code: int) -> None:
        """Says why, and ends the process: its main thread may wait for the others for ever."""
        # The progress bar has left the line unfinished.
        print(f"\n{text}", file=sys.stderr, flush=True)
        self._exit(code)

    def _exit(self, code: int) -> None:
        if self._hub is not None:
            self._hub.wait_for_the_others()
        os._exit(code)

    def _beat(self) -> None:
        while not self._over:
            self._send({"beat": 0})
            time.sleep(self._silence / BEATS)

    def _send(self, message: dict[str, Any]) -> None:
        # That the other side is gone, the listener finds out.
        with contextlib.suppress(OSError), self._changed:
            self._socket.sendall(json.dumps(message).encode() + b"\n")


def _listening(address: str, port: int, count: int, timeout: float, silence: float) -> Hub | None:
    """Process 0's hub; None where another process listens, which may say who it is.

    Raises:
        ValueError: it may not listen.
    """
    try:
        return Hub(port, count, timeout, silence)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ValueError(
            f"--coordinator {address}: process 0 cannot listen there ({error}); give another port"
        ) from error


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to process 0, which may start later.

    Raises:
        ValueError: there was none.
    """
    deadline = time.monotonic() + timeout
    while True:
        why: object = "it answered itself"
        try:
            made = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
            # Where nobody listens yet, a socket may be given this very port, and so find itself.
            if made.getsockname() != made.getpeername():
                return made
            made.close()
        except OSError as error:
            why = error
        if time.monotonic() + _RETRY_SECONDS > deadline:
            raise ValueError(
                f"--coordinator {host}:{port}: no process 0 there within {timeout:g} s ({why}); "
                "start it on that host, open the port, or give more --process-timeout"
            )
        time.sleep(_RETRY_SECONDS)
