"""The processes of one framework, one on each host, which do together what they are asked."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks.network.hosts import Network

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class HostError(Exception):
    """A host that did not do what it was asked; the message says why."""


class Place(NamedTuple):
    """What a process must know to work with the others.

    Attributes:
      module: the module whose `Worker` does the work.
      rank: which of the hosts this is.
      hosts: how many there are.
      address: this host's own.
      meeting_point: address and port at which the processes find each other.
      shapes: of the parameters.
    """

    module: str
    rank: int
    hosts: int
    address: str
    meeting_point: tuple[str, int]
    shapes: list[tuple[int, ...]]


class Processes:
    """Starts a process on each host and asks all of them the same."""

    def __init__(
        self, network: Network, module: str, port: int, shapes: list[tuple[int, ...]], limit: float
    ):
        self._limit = limit
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the processes
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for rank, host in enumerate(network.hosts):
                ours, theirs = multiprocessing.Pipe()
                self._pipes.append(ours)
                worker = ["-m", "benchmarks.network.worker", str(theirs.fileno())]
                with theirs:
                    child = subprocess.Popen(
                        host.command(sys.executable, *worker),
                        cwd=_ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=self._log,
                        stderr=self._log,
                        pass_fds=[theirs.fileno()],
                        # Ctrl-C is for the parent, which then ends them.
                        start_new_session=True,
                    )
                self._children.append(child)
                meeting_point = network.hosts[0].address, port
                ours.send(
                    Place(module, rank, len(network.hosts), host.address, meeting_point, shapes)
                )
            self._answers()
            undo.pop_all()

    def ask(self, *request: Any) -> list[Any]:
        """Sends all hosts the same request; their answers, in order.

        Raises:
          HostError: a host failed or did not answer in time. The processes are of no use any more.
        """
        for pipe in self._pipes:
            try:
                pipe.send(request)
            except BrokenPipeError:
                raise HostError(self._last_words()) from None
        return self._answers()

    def close(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.kill()
            child.wait()
        for pipe in self._pipes:
            pipe.close()
        self._log.close()

    def _answers(self) -> list[Any]:
        answers: dict[Any, Any] = {}
        deadline = time.monotonic() + self._limit
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            ready = multiprocessing.connection.wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                raise HostError(f"no answer in {self._limit:g} s")
            for pipe in ready:
                assert isinstance(pipe, multiprocessing.connection.Connection)
                try:
                    done, answers[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise HostError(self._last_words()) from None
                # The others may wait for the one that failed, so nobody waits for them.
                if not done:
                    raise HostError(answers[pipe])
        return [answers[pipe] for pipe in self._pipes]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"a process ended: {lines[-1] if lines else 'it printed nothing'}"
