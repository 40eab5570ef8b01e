"""Brings the processes of a run together under JAX, once they are known to be of one run."""

import contextlib
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import onebit_jax
import train
from train import digest, record
from train.config import RunConfig, shared_options
from train.meeting import Meeting

_MARK = ".seen-by-all-processes"
_LOOK_SECONDS = 10.0
_LONGEST_ADDRESS = 300


class Others:
    """The other processes of a run.

    Attributes:
        count: how many processes there are, this one included.
    """

    def __init__(self, count: int = 1, meeting: Meeting | None = None):
        self.count, self._meeting = count, meeting

    def agree(self, said: Callable[[], Mapping[str, str]] = dict) -> None:
        """Waits for all processes, and makes sure that they say the same.

        Args:
            said: makes values under names; not called if there are no others.

        Raises:
            ValueError: they do not; the message names what differs, and who has which value.
        """
        if self._meeting is not None:
            self._meeting.agree(said())

    def check_shared(self, folder: pathlib.Path) -> None:
        """Makes sure that all processes see the folder that process 0 has made.

        Raises:
            ValueError: they do not.
        """
        if self._meeting is None:
            return
        mark = folder / _MARK
        first = jax.process_index() == 0
        if first:
            mark.write_text(secrets.token_hex(8), encoding="utf-8")
        self._meeting.agree({})
        # A folder of a network may show late what was written elsewhere.
        deadline = time.monotonic() + _LOOK_SECONDS
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS / 50)
        seen = mark.read_text(encoding="utf-8") if mark.exists() else "nothing"
        name = "--out must be one folder for all processes, on a disk that they share; a mark in it"
        self._meeting.agree({name: seen})
        if first:
            mark.unlink()


@contextlib.contextmanager
def joined(
    program: str, config: RunConfig, outcome: Callable[[BaseException], tuple[int, str] | None]
) -> Iterator[Others]:
    """Starts JAX together with the other processes, which also leave together.

    Args:
        program: its module.
        config: its options.
        outcome: as for `train.meeting.Meeting`.

    Raises:
        ValueError: a process is missing, or has other options or another version of the code.
    """
    timeouts: Any = {
        "initialization_timeout": config.process_timeout,
        "heartbeat_timeout_seconds": config.process_timeout // 3,
        "shutdown_timeout_seconds": config.process_timeout,
    }
    count, index, address = config.processes, config.process_id, config.coordinator
    if address == "auto":
        try:
            jax.distributed.initialize(**timeouts)
        except Exception as error:  # each cluster's own
            raise ValueError(
                f"--coordinator auto: JAX finds no cluster here that it knows (Slurm, Open MPI 4, "
                f"Kubernetes, Cloud TPU): {error}; give HOST:PORT of process 0, --processes and "
                "--process-id"
            ) from error
        count, index, address = jax.process_count(), jax.process_index(), _told_by_process_0()
    if address is None or count == 1:
        yield Others()
        return
    with Meeting(address, index, count, config.process_timeout, outcome) as meeting:
        meeting.agree({"the program": program} | of_options(config) | of_code())
        if not jax.distributed.is_initialized():
            jax.distributed.initialize(address, count, index, **timeouts)
        yield Others(count, meeting)


def _told_by_process_0() -> str:
    """A free address of process 0, where JAX itself has found the processes."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{socket.getfqdn()}:{probe.getsockname()[1]}"
    letters = np.frombuffer(address.encode().ljust(_LONGEST_ADDRESS), np.uint8)
    return multihost_utils.broadcast_one_to_all(letters).tobytes().decode().strip()


def of_options(config: RunConfig) -> dict[str, str]:
    """The options that all processes must have alike, as the command line has them."""
    return {
        f"--{option.replace('_', '-')}": str(value)
        for option, value in shared_options(config).items()
    }


def of_code() -> dict[str, str]:
    """Versions of what computes, and of the code itself, whose version need not tell."""
    packages = ("numpy", "flax", "grain", "orbax-checkpoint", "tokenizers")
    return {
        **record.versions(*packages),
        **{
            f"the code of {package.__name__}": _of_package(package)
            for package in (train, onebit_jax)
        },
    }


def _of_package(package: Any) -> str:
    root = pathlib.Path(package.__file__).parent
    return digest.of_files(sorted(root.rglob("*.py")))
