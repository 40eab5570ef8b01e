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
from collections.abc import Sequence

from benchmarks.network.hosts import network, why_unavailable

_PORT = 23456


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the processes to their end; the highest of their exit codes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, default=2, help="how many, 2 or more")
    parser.add_argument("--program", default="train.lm.pretrain", help="the module to run")
    options, of_program = parser.parse_known_args(arguments)
    if options.processes < 2:
        parser.error(f"--processes {options.processes}: expected 2 or more")
    unavailable = why_unavailable()
    with contextlib.ExitStack() as made:
        if unavailable:
            print(f"{options.processes} processes on localhost. {unavailable}", flush=True)
            addresses = ["localhost"] * options.processes
            places = [[] for _ in addresses]
        else:
            hosts = made.enter_context(network(options.processes)).hosts
            print(f"{len(hosts)} processes, each in a network namespace of its own", flush=True)
            addresses = [host.address for host in hosts]
            # Gloo listens at the address that the host's name resolves to.
            named = ["sh", "-c", 'hostname "$0" && exec "$@"']
            places = [host.command(*named, host.address) for host in hosts]
        children = []
        made.callback(_end, children)
        for index, place in enumerate(places):
            program = [sys.executable, "-m", options.program, *of_program]
            program += ["--coordinator", f"{addresses[0]}:{_PORT}"]
            program += ["--processes", str(len(places)), "--process-id", str(index)]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            children.append(subprocess.Popen([*place, *program], env=environment))
        return max(child.wait() for child in children)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
