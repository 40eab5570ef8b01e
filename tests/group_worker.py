"""One of the processes of `test_process_group.py`, which need no JAX.

    python -m tests.group_worker ADDRESS ID COUNT TIMEOUT SEED [HOW]

meets the others, tells them its seed, makes three steps, and then fails, leaves, or waits: HOW.
"""

import os
import signal
import sys
import threading

from onebit_jax.training.process_group import exit_status
from onebit_jax.training.process_member import Member


def main(
    address: str, index: str, count: str, timeout: str, seed: str, then: str = "leave"
) -> None:
    # Started in a shell's background, a process ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Member(address, int(count), int(index), float(timeout), 5.0, exit_status) as member:
        # Longer than a message between processes may be.
        member.agree({"--seed": seed * 2**21 if then == "leave at length" else seed})
        print("agreed", flush=True)
        for _ in range(3):
            member.progress()
        match then:
            case "raise":
                raise ValueError("the disk is full")
            case "raise at length":
                raise ValueError("full " * 2**21)
            case "interrupt":
                _interrupt()
            case "interrupt twice":
                threading.Timer(1, _interrupt).start()
                _interrupt()
            case "interrupt the wait for others":
                threading.Timer(1, _interrupt).start()
            case "exit":
                sys.exit(7)
            case "fork":
                # The child lives until the test reads what this process printed.
                if not os.fork():
                    sys.stdin.read()
                    os._exit(0)
                print("forked", flush=True)
                threading.Event().wait()
            case "wait":
                threading.Event().wait()


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
