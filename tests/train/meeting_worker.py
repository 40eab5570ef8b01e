"""One of the processes of `test_meeting.py`, which need no JAX.

    python -m tests.train.meeting_worker ADDRESS INDEX COUNT TIMEOUT SEED [raise|wait]

meets the others, tells them its seed, and then leaves, fails, or waits for a line that never comes.
"""

import sys

from train.meeting import Meeting


def main(address: str, index: str, count: str, timeout: str, seed: str, then: str = "") -> None:
    with Meeting(
        address, int(index), int(count), float(timeout), lambda error: (2, f"error: {error}")
    ) as meeting:
        meeting.agree({"--seed": seed})
        print("agreed", flush=True)
        if then == "raise":
            raise ValueError("the disk is full")
        if then == "wait":
            sys.stdin.readline()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
