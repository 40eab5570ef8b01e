"""Where the processes of a run meet: process 0 hears of all others, and tells all of what it hears.

A message is a line of JSON. It travels on connections of its own rather than over JAX's service,
whose client ends a process without a Python exception, so that nobody could say what went wrong.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

BEATS = 10  # in the time that a process may be silent
ENDED = "ended without a word; see what it printed itself"
SILENT = "has been silent for {:g} s; see whether it, or its host, hangs"
_NAMED = 8
_LINE = 2**20
_LATE_SECONDS = 4.0
_LEAVING_SECONDS = 10.0


class _Peer(NamedTuple):
    host: str
    writer: asyncio.StreamWriter


class Hub:
    """Listens in a thread of its own until all processes have said that they are done.

    What it sends: `beat`; `agreed`, when all have said the same; `refused` with a text, when they
    cannot work together; `stopped` with the id of the process that failed, a text, and the exit
    code for all.

    Args:
        port: where it listens.
        count: how many processes there are.
        timeout: seconds in which all must have come.
        silence: seconds after which one that is silent is given up.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, count: int, timeout: float, silence: float):
        self._count, self._timeout, self._silence = count, timeout, silence
        self._peers: dict[int, _Peer] = {}
        self._said: dict[int, dict[str, str]] = {}
        self._done: set[int] = set()
        self._verdict: dict[str, Any] | None = None
        self._all_came = asyncio.Event()
        self._closed = False
        self._left = threading.Event()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True).start()

    def wait_for_the_others(self) -> None:
        """Waits a little until all others have left, so that each has read why it must."""
        self._left.wait(_LEAVING_SECONDS)

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._hear, sock=listening, limit=_LINE)
        beats = asyncio.create_task(self._beat())
        try:
            await asyncio.wait_for(self._all_came.wait(), self._timeout)
        except TimeoutError:
            missing = set(range(self._count)) - self._said.keys()
            text = (
                f"{named(missing)} of {self._count} did not come within {self._timeout:g} s; start "
                "each of them with this --coordinator and its own --process-id, or give them more "
                "--process-timeout"
            )
            self._finish({"refused": text})
        if self._verdict:
            # Those that come a little later are told as well.
            await asyncio.sleep(_LATE_SECONDS)
        # JAX's service listens at the same port from here on.
        server.close()
        self._closed = True
        self._compare()
        self._see_who_is_left()
        await beats

    async def _beat(self) -> None:
        while self._peers or not self._verdict:
            self._tell({"beat": 0})
            await asyncio.sleep(self._silence / BEATS)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), self._silence))
            index, count, host = int(hello["id"]), int(hello["count"]), str(hello["host"])
        except (OSError, TimeoutError, ValueError, KeyError, TypeError):
            writer.close()  # no process of any run
            return
        wrong = self._unfit(index, count, host)
        if wrong:
            self._finish({"refused": wrong})
        if self._verdict:
            _send(writer, self._verdict)
            return
        self._peers[index] = _Peer(host, writer)
        how = ENDED
        try:
            while line := await asyncio.wait_for(reader.readline(), self._silence):
                self._heard(index, json.loads(line))
        except TimeoutError:
            how = SILENT.format(self._silence)
        except (OSError, ValueError) as error:
            if not isinstance(error, ConnectionError):
                how = f"was cut off ({error})"
        self._stop(index, f"it {how}", 1)
        del self._peers[index]
        self._see_who_is_left()

    def _see_who_is_left(self) -> None:
        if self._closed and self._peers.keys() <= {0}:
            self._left.set()

    def _unfit(self, index: int, count: int, host: str) -> str | None:
        """What is wrong with a process that has come."""
        if count != self._count:
            return (
                f"--processes: {count} on process {index} ({host}), {self._count} on process 0; "
                "give all processes the same"
            )
        if index in self._peers:
            return (
                f"--process-id {index}: two processes have it, on {self._peers[index].host} and on "
                f"{host}; give each its own, 0 to {count - 1}"
            )
        return None

    def _heard(self, index: int, message: dict[str, Any]) -> None:
        if "said" in message:
            self._said[index] = message["said"]
            if message["last"]:
                self._done.add(index)
            if len(self._said) < self._count:
                return
            # The first time everybody waits until the port is free.
            if self._all_came.is_set():
                self._compare()
            self._all_came.set()
        elif "stopped" in message:
            self._stop(index, message["stopped"], message["code"])

    def _compare(self) -> None:
        if self._verdict:
            return
        wrong, self._said = differing(self._said), {}
        if wrong:
            self._finish({"refused": wrong})
        elif len(self._done) == self._count:
            self._finish({"agreed": 0})
        else:
            self._tell({"agreed": 0})

    def _stop(self, index: int, text: str, code: int) -> None:
        host = self._peers[index].host
        self._finish({"stopped": index, "host": host, "text": text, "code": code})

    def _finish(self, verdict: dict[str, Any]) -> None:
        """Tells all how the run ended; what follows from it is of no interest."""
        if not self._verdict:
            self._verdict = verdict
            self._tell(verdict)
            self._all_came.set()

    def _tell(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            _send(peer.writer, message)


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        writer.write(json.dumps(message).encode() + b"\n")


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

    >>> differing({0: {"--seed": "0"}, 1: {"--seed": "1"}})
    '--seed: 0 on process 0, 1 on process 1; give all processes the same'
    """
    names = dict.fromkeys(name for own in said.values() for name in own)
    found = []
    for name in names:
        having: dict[str, list[int]] = {}
        for index in sorted(said):
            having.setdefault(said[index].get(name, "nothing"), []).append(index)
        if len(having) > 1:
            values = ", ".join(f"{value} on {named(ids)}" for value, ids in having.items())
            found.append(f"{name}: {values}")
    return f"{'; '.join(found)}; give all processes the same" if found else None
