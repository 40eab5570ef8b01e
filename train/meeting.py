"""Where the processes of a run meet before JAX starts, and hear of one that ends.

JAX alone ends a process with a C++ trace where another one is missing or has its number, runs on
where they differ in their options, and waits where one has raised: nobody could say what went
wrong. So all processes keep a TCP connection to process 0, on which a message is a line of JSON.
That one hangs, or its host is gone, JAX's own heartbeats find out.
"""

import contextlib
import errno
import json
import os
import queue
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

_FAILED = 1  # the exit code where nobody knows better
_GONE = "it ended without a word; see what it printed itself"
_NAMED = 8
_HELLO_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_NEWS_SECONDS = 3.0
_LATE_SECONDS = 4.0
_LEAVING_SECONDS = 10.0
_LONGEST = 2**20


class RefusedError(ValueError):
    """The processes cannot work together; all of them are told the same."""


class Line(NamedTuple):
    """A connection that carries messages.

    Attributes:
        connection: the socket.
        file: what comes in on it.
        host: of the other side.
    """

    connection: socket.socket
    file: Any
    host: str = ""

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """The line over a connection."""
        # Unbuffered: what has been read ahead, a selector would not see.
        return cls(connection, connection.makefile("rb", buffering=0))

    def send(self, **message: Any) -> None:
        """Sends a message; that the other side is gone, who listens to it finds out."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other side has ended, or is no process of any run."""
        try:
            message = json.loads(self.file.readline(_LONGEST))
        except (OSError, ValueError, RecursionError):
            return None
        return message if _is_message(message) else None


def _is_message(message: Any) -> bool:
    """Whether this is what a process of a run sends, rather than a stranger at the same port."""
    match message:
        case {"stopped": {"text": str(), "code": int(code)}, **rest} if not rest:
            return 0 < code < 256
        case {"stopped": int(), "host": str(), "text": str(), "code": int(code)}:
            return 0 < code < 256
        case {"said": dict(said)}:
            return all(isinstance(value, str) for value in said.values())
        case {"id": int(), "count": int(), "host": str()}:
            return type(message["id"]) is type(message["count"]) is int
        case {"refused": str()} | {"agreed": True} | {"done": True}:
            return True
    return False


class Hub(threading.Thread):
    """What process 0 does for all: it hears of everyone, and tells everyone of what it hears.

    It sends `agreed`, when all have said the same; `refused` with a text, when they cannot work
    together; `stopped` with the id of the process that failed, its host, a text and the exit code.
    It ends when all have left.

    Args:
        listening: where the others come, until all have.
        count: how many processes there are.
        timeout: seconds in which all must have come.
    """

    def __init__(self, listening: socket.socket, count: int, timeout: float):
        super().__init__(daemon=True)
        self._listening, self._count, self._timeout = listening, count, timeout
        self._lines: dict[int, Line] = {}
        self.start()

    def run(self) -> None:
        """The work of the thread."""
        refused = self._receive_all()
        # JAX's service listens at the same port from here on.
        self._listening.close()
        said: dict[int, dict[str, str]] = {}
        done: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, index)
            if refused:
                self._tell(refused=refused)
                done |= self._lines.keys()
            while self._lines:
                for key, _ in selector.select():
                    index, line = key.data, self._lines[key.data]
                    message = line.receive()
                    if message is None:
                        selector.unregister(line.connection)
                        del self._lines[index]
                        message = {"stopped": {"text": _GONE, "code": _FAILED}}
                    if "stopped" in message and index not in done:
                        self._tell(stopped=index, host=line.host, **message["stopped"])
                        # What follows from it is of no interest.
                        done |= self._lines.keys()
                    elif "said" in message:
                        said[index] = message["said"]
                    else:
                        done.add(index)
                    if len(said) == self._count:
                        wrong, said = differing(said), {}
                        self._tell(**{"refused": wrong} if wrong else {"agreed": True})

    def _receive_all(self) -> str | None:
        """Waits for all processes; what is wrong with them, of which late ones are told, too."""
        refused, deadline = None, time.monotonic() + self._timeout
        while refused or len(self._lines) < self._count:
            wrong = None
            self._listening.settimeout(max(_RETRY_SECONDS, deadline - time.monotonic()))
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                if refused:
                    return refused
                missing = named(set(range(self._count)) - self._lines.keys())
                wrong = (
                    f"{missing} of {self._count} did not come within {self._timeout:g} s; start "
                    "each of them with this --coordinator and its own --process-id, or give them "
                    "more --process-timeout"
                )
            else:
                connection.settimeout(_HELLO_SECONDS)
                line = Line.of(connection)
                hello = line.receive() or {}
                connection.settimeout(None)
                if hello.keys() == {"id", "count", "host"}:
                    wrong = self._unfit(**hello)
                    if refused or wrong:
                        line.send(refused=refused or wrong)
                    else:
                        self._lines[hello["id"]] = line._replace(host=hello["host"])
            if wrong and not refused:
                refused, deadline = wrong, time.monotonic() + _LATE_SECONDS
        return None

    def _unfit(self, id: int, count: int, host: str) -> str | None:
        """What is wrong with a process that has come."""
        if count != self._count:
            return (
                f"--processes: {count} on process {id} ({host}), {self._count} on process 0; "
                "give all processes the same"
            )
        if not 0 <= id < count:
            return f"--process-id {id} ({host}): expected 0 to {count - 1}"
        if id in self._lines:
            return (
                f"--process-id {id}: two processes have it, on {self._lines[id].host} and on "
                f"{host}; give each its own, 0 to {count - 1}"
            )
        return None

    def _tell(self, **message: Any) -> None:
        for line in self._lines.values():
            line.send(**message)


class Meeting:
    """A process among others; a context manager, which all leave together.

    While it is entered, a process that fails or dies ends all others: they say which one it was,
    and exit. What is raised inside is reported to them first.

    Args:
        address: HOST:PORT of process 0.
        index: which process this is, from 0.
        count: how many there are, 2 or more.
        timeout: seconds in which all must come.
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
        self._address, self._index, self._outcome = address, index, outcome
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._over = False
        host, _, port = address.rpartition(":")
        listening = _listening(address, int(port)) if index == 0 else None
        self._hub = Hub(listening, count, timeout) if listening else None
        self._line = Line.of(_connect(host.strip("[]"), int(port), timeout))
        # Within this time all have come and said what the first answer depends on.
        self._line.connection.settimeout(2 * timeout + _LATE_SECONDS)
        self._line.send(id=index, count=count, host=socket.gethostname())
        threading.Thread(target=self._listen, daemon=True).start()

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
        if not isinstance(error, RefusedError):
            self.agree({})
        self._over = True
        self._line.send(done=True)
        self._leave()

    def agree(self, said: Mapping[str, str]) -> None:
        """Waits for all processes, and makes sure that they say the same: values under names.

        Raises:
            RefusedError: they do not, or one of them has not come.
        """
        self._line.send(said=dict(said))
        if refused := self._answers.get():
            raise RefusedError(refused)

    def _fail(self, error: BaseException, code: int, text: str) -> None:
        """Ends the process: JAX's own end would wait for the others."""
        # What was raised may follow from what happened to another one, which ends this one too.
        time.sleep(_NEWS_SECONDS)
        self._over = True
        if code == _FAILED:
            traceback.print_exception(error)
        else:
            print(text, file=sys.stderr)
        self._line.send(stopped={"text": text, "code": code})
        self._exit(code)

    def _listen(self) -> None:
        met = False
        while message := self._line.receive():
            met = True
            self._line.connection.settimeout(None)
            if "stopped" not in message:
                self._over = self._over or "refused" in message
                self._answers.put(message.get("refused"))
            elif message["stopped"] != self._index:
                who = f"process {message['stopped']} on {message['host']}"
                why = message["text"].removeprefix("error: ")
                self._end(f"{who} stopped: {why}", message["code"])
        if not met:
            self._answers.put(
                f"--coordinator {self._address}: what answers there is not process 0 of this run, "
                "or a run that began already; give another port, or end what has it"
            )
        elif not self._over:
            self._end(f"process 0 stopped: {_GONE}", _FAILED)

    def _end(self, text: str, code: int) -> None:
        """Says why, and ends the process: its main thread may wait for the others for ever."""
        # The progress bar has left the line unfinished.
        print(f"\nerror: {text}", file=sys.stderr)
        self._exit(code)

    def _exit(self, code: int) -> None:
        sys.stderr.flush()
        self._leave()
        os._exit(code)

    def _leave(self) -> None:
        """Ends the connection; process 0 waits a little until all others have read why."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._line.connection.shutdown(socket.SHUT_RDWR)
        if self._hub is not None:
            self._hub.join(_LEAVING_SECONDS)


def _listening(address: str, port: int) -> socket.socket | None:
    """Where process 0 listens; None where another process does, which may say who it is."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ValueError(
            f"--coordinator {address}: process 0 cannot listen there ({error}); give another port"
        ) from error


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to process 0, which may start later; a `ValueError` if there is none."""
    deadline = time.monotonic() + timeout
    while True:
        why: object = "it answered itself"
        try:
            made = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
            # Where nobody listens yet, a socket may be given this very port, and so find itself.
            if made.getsockname() != made.getpeername():
                made.settimeout(None)
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


def named(ids: Iterable[int]) -> str:
    """Says which processes.

    >>> named([1]), named({2, 0}), named(range(64))
    ('process 1', 'processes 0, 2', 'processes 0, 1, 2, 3, 4, 5, 6, 7 and 56 more')
    """
    ids = sorted(ids)
    listed = ", ".join(map(str, ids[:_NAMED]))
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"process{'es' if len(ids) > 1 else ''} {listed}{more}"


def differing(said: Mapping[int, Mapping[str, str]]) -> str | None:
    """What processes do not say alike, of values under names.

    >>> differing({0: {"--seeds": "0"}, 1: {"--seeds": "1"}})
    '--seeds: 0 on process 0, 1 on process 1; give all processes the same'
    """
    found = []
    for name in dict.fromkeys(name for own in said.values() for name in own):
        having: dict[str, list[int]] = {}
        for index in sorted(said):
            having.setdefault(said[index].get(name, "nothing"), []).append(index)
        if len(having) > 1:
            values = ", ".join(f"{value} on {named(ids)}" for value, ids in having.items())
            found.append(f"{name}: {values}")
    return f"{'; '.join(found)}; give all processes the same" if found else None
