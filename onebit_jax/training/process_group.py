"""The context manager in which the processes of a run begin, train and end together."""

import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from onebit_jax import validation
from onebit_jax.training.process_member import FAILED, Member, ProcessGroup
from onebit_jax.training.process_messages import check_same

_LONGEST_ADDRESS = 300
# A process that fails first waits for news of others, for 3 s.
_LEAST_STALL_TIMEOUT = 4.0


def exit_status(error: BaseException) -> tuple[int, str] | None:
    """The exit code of a process that raised ``error``, and what the others say of it.

    >>> exit_status(ValueError("no more data")), exit_status(KeyboardInterrupt())
    ((1, 'ValueError: no more data'), (130, 'it was interrupted'))
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "it was interrupted"
    if isinstance(error, SystemExit):
        if isinstance(error.code, int) and error.code:
            return error.code % 256 or FAILED, f"it exited with {error.code}"
        return (FAILED, str(error.code)) if error.code else None
    return FAILED, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def process_group(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 60,
    stall_timeout: float | None = 600.0,
    same: Mapping[str, str] | None = None,
    exit_status: Callable[[BaseException], tuple[int, str] | None] = exit_status,
) -> Iterator[ProcessGroup]:
    """Starts JAX in the processes of a run, which then end together, with a reason.

    A process that waits in a collective cannot be interrupted, and JAX alone does not say which
    other process it waits for. So all processes keep a TCP connection to process 0. Within the
    block:

    - a process that raises, is interrupted or dies ends all others. They print
      ``error: process 1 on node02 stopped: ValueError: ...`` and exit with its code, 3 seconds
      after the exception: it may follow from the end of another process, which is then named;
    - if no process calls ``progress()`` for ``stall_timeout`` seconds, all print which line of its
      program each of them executes, and exit with 1. So it ends when one process left its loop
      early, saved a checkpoint alone, or made a collective that the others did not;
    - a process that reaches the end of the block waits there for the others.

    An exception that leaves the block does not pass further: the process exits at once, since
    JAX's own end would wait for the others. Outside the block nothing is watched. JAX's heartbeats
    find a process whose host loses power, and process 0 if it is suspended, within a third of
    ``timeout``.

    Args:
      coordinator_address: HOST:PORT of process 0, a free port that all processes can reach, as for
        ``jax.distributed.initialize``. None if that was called before, or if JAX finds the address
        itself (Slurm, Open MPI, Kubernetes, Cloud TPU).
      num_processes: the number of processes; with an address only. 1 needs no address, and has
        nothing to wait for.
      process_id: which of them this one is, from 0; with an address only.
      timeout: seconds in which all processes must come, 6 or more. JAX's own timeouts are made of
        it: heartbeats must come within a third.
      stall_timeout: seconds, more than 4. It must exceed the longest time between two calls of
        ``progress()``, with compilations, checkpoints and evaluations. None for no limit.
      same: values under names that must be the same on all processes, such as options. They are
        compared before JAX starts.
      exit_status: of an exception, the exit code of the process and what the others print; None if
        all processes raise it together.

    Yields:
      The group: ``progress()`` is to be called once a step, ``agree`` compares values.

    Raises:
      ValueError: on all processes, if one of them is missing, has another's number, or gives other
        values in ``same``; for an argument that is out of range.

    Example:
      One process here; on two hosts ``process_group("node01:12345", 2, rank)``, or
      ``process_group()`` under Slurm:

      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> with onebit_jax.process_group(num_processes=1) as group:
      ...     mesh = jax.make_mesh((jax.device_count(),), ("data",))
      ...     tx = onebit_jax.onebit_adam(1e-2, warmup=5, axis_name="data")
      ...     params = jnp.zeros(3)
      ...     opt_state = onebit_jax.init(tx, params, mesh)
      ...     step = onebit_jax.train_step(lambda p, x: jnp.mean((x - p) ** 2), tx, mesh)
      ...     for _ in range(10):
      ...         params, opt_state, metrics = step(params, opt_state, jnp.ones((8, 3)))
      ...         group.progress()
    """
    _check(coordinator_address, num_processes, process_id, timeout, stall_timeout)
    check_same({} if same is None else same)
    timeouts: Any = {
        "initialization_timeout": timeout,
        "heartbeat_timeout_seconds": timeout // 3,
        "shutdown_timeout_seconds": timeout,
    }
    address, count, index = coordinator_address, num_processes, process_id
    if address is None and count is None:
        if not jax.distributed.is_initialized():
            _find_cluster(timeouts)
        count, index = jax.process_count(), jax.process_index()
    if count == 1:
        yield ProcessGroup()
        return
    assert count is not None
    assert index is not None
    address = address or _told_by_process_0()
    with Member(address, count, index, timeout, stall_timeout, exit_status) as member:
        member.agree(same or {})
        if not jax.distributed.is_initialized():
            jax.distributed.initialize(address, count, index, **timeouts)
        yield member


def _check(
    address: str | None,
    count: int | None,
    index: int | None,
    timeout: float,
    stall_timeout: float | None,
) -> None:
    validation.check_step_count("timeout", timeout, 6, "60 is usual.")
    if stall_timeout is not None:
        least = _LEAST_STALL_TIMEOUT
        validation.check_between("stall_timeout", stall_timeout, least, math.inf, 600.0)
    if address is None and count in (None, 1) and index in (None, 0):
        return
    host, _, port = str(address).rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"coordinator_address={address!r} must be HOST:PORT of process 0, or None where JAX "
            "finds the processes itself, without num_processes and process_id."
        )
    validation.check_step_count("num_processes", count, 1, "Count all processes of the run.")
    validation.check_step_count("process_id", index, 0, "Process 0 has 0.")
    assert count is not None
    assert index is not None
    if index >= count:
        raise ValueError(f"process_id={index} must be from 0 to {count - 1}, num_processes - 1.")
    if count > 1 and jax.distributed.is_initialized():
        raise ValueError(
            "jax.distributed.initialize was called before: call process_group without a "
            "coordinator_address, or let it start JAX itself."
        )


def _find_cluster(timeouts: Any) -> None:
    """Starts JAX where it finds the other processes itself."""
    try:
        jax.distributed.initialize(**timeouts)
    except Exception as error:  # each cluster's own
        raise ValueError(
            f"JAX finds no cluster here that it knows (Slurm, Open MPI 4, Kubernetes, Cloud TPU): "
            f"{error}; give HOST:PORT of process 0 as coordinator, the number of processes and "
            "this one's id"
        ) from error


def _told_by_process_0() -> str:
    """A free address of process 0, where JAX has found the processes."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{socket.getfqdn()}:{probe.getsockname()[1]}"
    letters = np.frombuffer(address.encode().ljust(_LONGEST_ADDRESS), np.uint8)
    return multihost_utils.broadcast_one_to_all(letters).tobytes().decode().strip()
