"""The thread of process 0 that hears of all processes of a group, and tells all what it hears."""

import selectors
import socket
import threading
import time
from typing import Any

from onebit_jax.training.process_connections import RETRY_SECONDS, Line
from onebit_jax.training.process_messages import FAILED, by_value, differing, named, shortened

GONE = "it ended without a word; see what it printed itself"
# In addition to the time in which all processes must have come: for those that come too late, and
# are told that.
LATE_SECONDS = 4.0
_HELLO_SECONDS = 5.0
# In which a process says where it is.
_REPORT_SECONDS = 3.0


class Hub(threading.Thread):
    """Hears of all processes, process 0 included; ends when all have left.

    It sends `agreed` once all have said the same, and once all have left the group's block;
    `refused` with a text if they cannot work together; `report` to hear where each one is; and
    `end`, with a text and an exit code, if a process has failed or none makes progress.

    Args:
      listening: the socket at which the others come, open until all have.
      count: the number of processes.
      timeout: seconds in which all must have come.
      stall_timeout: seconds in which one process at least must make progress; None for no limit.
    """

    def __init__(
        self, listening: socket.socket, count: int, timeout: float, stall_timeout: float | None
    ):
        super().__init__(daemon=True)
        self._listening, self._count, self._timeout = listening, count, timeout
        self._stall_timeout = stall_timeout
        self._lines: dict[int, Line] = {}
        self._hosts: dict[int, str] = {}
        self._said: dict[int, dict[str, str]] = {}
        # Calls of `progress` by processes that wait for the others at the end of the block.
        self._left: dict[int, int] = {}
        # Until when all that were asked where they are must have answered, and their answers.
        self._asked: float | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        # Nothing that happens after a process has failed is of interest: it follows from that.
        self._over = False
        self.start()

    def run(self) -> None:
        """The work of the thread."""
        refused = self._receive_all()
        # JAX's service listens at the same port from here on.
        self._listening.close()
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, index)
            if refused:
                self._over = True
                self._tell(refused=refused)
            while self._lines:
                for key, _ in selector.select(self._patience()):
                    index, line = key.data, self._lines[key.data]
                    message = line.receive()
                    if message is None:
                        selector.unregister(line.connection)
                        del self._lines[index]
                        message = {"stopped": GONE, "code": FAILED}
                    if not self._over:
                        self._hear(index, message)
                if self._asked is not None and not self._over:
                    self._judge()

    def _patience(self) -> float | None:
        """Seconds that answers may still take; None where none are awaited."""
        if self._asked is None or self._over:
            return None
        return max(0.0, self._asked - time.monotonic())

    def _hear(self, index: int, message: dict[str, Any]) -> None:
        """Answers a message of a process."""
        if "stopped" in message:
            who = f"process {index} on {self._hosts[index]}"
            self._end(f"{who} stopped: {message['stopped']}", message["code"], but=index)
        elif "done" in message:
            # All others have been told the same, and leave too.
            self._over = True
        elif "said" in message:
            self._said[index] = message["said"]
            if len(self._said) == self._count:
                wrong, self._said = differing(self._said), {}
                if wrong:
                    self._tell(refused=wrong)
                else:
                    self._tell(agreed=True)
        elif "left" in message:
            self._left[index] = message["left"]
            if len(self._left) == self._count:
                self._tell(agreed=True)
        elif "stalled" in message and self._asked is None:
            self._asked, self._answers = time.monotonic() + _REPORT_SECONDS, {}
            self._tell(report=True)
        elif "line" in message:
            self._answers[index] = message

    def _judge(self) -> None:
        """Ends all processes unless one of them makes progress, as their answers say."""
        assert self._asked is not None
        assert self._stall_timeout is not None
        expected = self._lines.keys() - self._left.keys()
        if expected - self._answers.keys() and time.monotonic() < self._asked:
            return
        self._asked = None
        answers = {index: self._answers[index] for index in expected & self._answers.keys()}
        if all(answer["seconds"] >= self._stall_timeout for answer in answers.values()):
            self._end(self._stall(answers), FAILED)

    def _stall(self, answers: dict[int, dict[str, Any]]) -> str:
        """Says where each process is."""
        places = {}
        for index in range(self._count):
            place = f"no answer within {_REPORT_SECONDS:g} s"
            if index in self._left:
                place = f"left the block after {_times(self._left[index])}"
            elif index in answers:
                answer = answers[index]
                place = f"at {answer['line']}, after {_times(answer['calls'])}"
            places[index] = place
        having = by_value(places).items()
        listed = shortened("; ".join(f"{named(ids)}: {place}" for place, ids in having))
        at_one_line = ""
        if len(answers) == self._count and len({x["line"] for x in answers.values()}) == 1:
            at_one_line = (
                ". All are at one line: they may run different programs there, as with states of "
                "different updates or dtypes; give all the same state and options"
            )
        return (
            f"no process called progress() for {self._stall_timeout:g} s: {listed}. A collective "
            "and a checkpoint wait until every process calls them: make the same calls on all; or "
            "give a longer stall_timeout, if a step, an evaluation or a compilation takes so long"
            f"{at_one_line}"
        )

    def _receive_all(self) -> str | None:
        """Waits for all processes; what is wrong with them, which late ones are told too."""
        refused, deadline = None, time.monotonic() + self._timeout
        while refused or len(self._lines) < self._count:
            self._listening.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                if refused:
                    return refused
                missing = named(set(range(self._count)) - self._lines.keys())
                wrong = (
                    f"{missing} of {self._count} did not come within {self._timeout:g} s; start "
                    "each of them with the same coordinator and its own process id, or give them "
                    "more time"
                )
            else:
                wrong = self._receive(connection, refused)
            if wrong and not refused:
                refused, deadline = wrong, time.monotonic() + LATE_SECONDS
        return None

    def _receive(self, connection: socket.socket, refused: str | None) -> str | None:
        """Notes a process that has come; what is wrong with it."""
        connection.settimeout(_HELLO_SECONDS)
        line = Line(connection)
        hello = line.receive() or {}
        connection.settimeout(None)
        if hello.keys() != {"id", "count", "host"}:
            return None
        index, host = hello["id"], hello["host"]
        wrong = self._unfit(index, hello["count"], host)
        if refused or wrong:
            line.send(refused=refused or wrong)
        else:
            self._lines[index], self._hosts[index] = line, host
        return wrong

    def _unfit(self, index: int, count: int, host: str) -> str | None:
        if count != self._count:
            return (
                f"number of processes: {count} on process {index} ({host}), {self._count} on "
                "process 0; give all processes the same"
            )
        if not 0 <= index < count:
            return f"process id {index} ({host}): expected 0 to {count - 1}"
        if index in self._lines:
            return (
                f"process id {index}: two processes have it, on {self._hosts[index]} and on "
                f"{host}; give each its own, 0 to {count - 1}"
            )
        return None

    def _end(self, text: str, code: int, but: int | None = None) -> None:
        self._over = True
        self._tell(but=but, end=text, code=code)

    def _tell(self, *, but: int | None = None, **message: Any) -> None:
        for index, line in self._lines.items():
            if index != but:
                line.send(**message)


def _times(calls: int) -> str:
    return f"{calls} call{'' if calls == 1 else 's'} of progress()"
