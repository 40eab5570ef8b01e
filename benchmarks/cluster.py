"""Runs a training program in several processes of this machine, as on the hosts of a cluster.

    python -m benchmarks.cluster
    python -m benchmarks.cluster --processes 4 --program train.bert.pretrain --steps 100 --warmup 25

All other options are the program's. Where Linux, root and iproute2 allow it each process runs in a
network namespace, with an address and a host name of its own; elsewhere all share localhost.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.network.hosts import network, why_unavailable

_PORT = 23456


def run(program: Sequence[str], commands: Sequence[Sequence[str]], address: str) -> int:
    """Runs a program's processes; the highest of their exit codes, 128 + N for a signal N.

    Args:
      program: the module, and its options.
      commands: for each process, what its command line begins with.
      address: of process 0.
    """
    meet = ["--coordinator", f"{address}:{_PORT}", "--processes", str(len(commands))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    children = []
    try:
        for index, place in enumerate(commands):
            command = [*place, sys.executable, "-m", *program, *meet, "--process-id", str(index)]
            children.append(subprocess.Popen(command, env=environment))
        codes = [child.wait() for child in children]
        return max(128 - code if code < 0 else code for code in codes)
    finally:
        for child in children:
            child.kill()
            child.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the processes to their end and returns their exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--processes", type=int, default=2, help="how many, 2 or more")
    parser.add_argument("--program", default="train.lm.pretrain", help="the module to run")
    options, of_program = parser.parse_known_args(arguments)
    why = why_unavailable()
    where = f"on localhost. {why}" if why else "each in a network namespace"
    print(f"{options.processes} processes, {where}", flush=True)
    program = [options.program, *of_program]
    if why:
        return run(program, [[]] * options.processes, "localhost")
    with network(options.processes) as made:
        # Gloo listens at the address that the host's name resolves to.
        named = ["sh", "-c", 'hostname "$0" && exec "$@"']
        commands = [host.command(*named, host.address) for host in made.hosts]
        return run(program, commands, made.hosts[0].address)


if __name__ == "__main__":
    sys.exit(main())
