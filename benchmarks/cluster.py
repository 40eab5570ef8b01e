"""Runs a training program in several processes of this machine, as on the hosts of a cluster.

    python -m benchmarks.cluster
    python -m benchmarks.cluster --processes 4 --program train.bert.pretrain --steps 100 --warmup 25

All other options are the program's. Where Linux, root and iproute2 allow it each process runs in a
network namespace, with an address and a host name of its own; elsewhere all share localhost.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from benchmarks.network.hosts import Network, network, why_unavailable

_PORT = 23456


class Places(NamedTuple):
    """Where processes run.

    Attributes:
        address: of process 0.
        commands: for each process, what its command line begins with.
        network: that of their hosts; None on localhost.
        why: why they are on localhost, and how to mend it; empty if they are not.
    """

    address: str
    commands: list[list[str]]
    network: Network | None
    why: str

    def start(
        self, program: Sequence[str], port: int = _PORT, logs: Sequence[IO[bytes]] = ()
    ) -> list[subprocess.Popen[bytes]]:
        """Starts a program in each place.

        Args:
            program: the module, and its options.
            port: where process 0 meets the others.
            logs: for each process, where what it prints goes; without them, as this one's.
        """
        children = []
        for index, place in enumerate(self.commands):
            command = [*place, sys.executable, "-m", *program]
            command += ["--coordinator", f"{self.address}:{port}"]
            command += ["--processes", str(len(self.commands)), "--process-id", str(index)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            log = logs[index] if logs else None
            children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return children


@contextlib.contextmanager
def places(count: int) -> Iterator[Places]:
    """Makes places for so many processes, and removes them in the end."""
    why = why_unavailable()
    if why:
        yield Places("localhost", [[] for _ in range(count)], None, why)
        return
    with network(count) as made:
        # Gloo listens at the address that the host's name resolves to.
        named = ["sh", "-c", 'hostname "$0" && exec "$@"']
        commands = [host.command(*named, host.address) for host in made.hosts]
        yield Places(made.hosts[0].address, commands, made, "")


def end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leaves none of them running."""
    for child in children:
        child.kill()
        child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the processes to their end; the highest of their exit codes, 128 + N for a signal N."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, default=2, help="how many, 2 or more")
    parser.add_argument("--program", default="train.lm.pretrain", help="the module to run")
    options, of_program = parser.parse_known_args(arguments)
    if options.processes < 2:
        parser.error(f"--processes {options.processes}: expected 2 or more")
    with places(options.processes) as found:
        where = f"on localhost. {found.why}" if found.why else "each in a network namespace"
        print(f"{options.processes} processes, {where}", flush=True)
        children = found.start([options.program, *of_program])
        try:
            codes = [child.wait() for child in children]
            return max(128 - code if code < 0 else code for code in codes)
        finally:
            end(children)


if __name__ == "__main__":
    sys.exit(main())
