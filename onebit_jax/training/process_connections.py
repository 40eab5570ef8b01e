"""TCP connections between the processes of a group, on which a message is a line of JSON."""

import contextlib
import errno
import json
import os
import socket
import time
import weakref
from typing import Any

from onebit_jax.training.process_messages import LONGEST, is_message

RETRY_SECONDS = 0.2
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes what a child has of its parent's sockets.

    While it held them, the others would not notice that the parent was killed.
    """
    for mine in list(_open):
        if mine.fileno() >= 0:
            # Not `close`, which waits for `Line`, nor `shutdown`, which would end the parent's too.
            os.close(mine.detach())


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_close_in_child)


class Line:
    """Messages over a connection.

    Args:
      connection: the socket.

    Attributes:
      connection: the same.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        _open.add(connection)
        # Unbuffered: a selector would not see what has been read ahead.
        self._incoming = connection.makefile("rb", buffering=0)

    def send(self, **message: Any) -> None:
        """Sends a message. If the other side is gone, `receive` will tell."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other side has ended, or is no process of any group."""
        try:
            message = json.loads(self._incoming.readline(LONGEST))
        except (OSError, ValueError, RecursionError):
            return None
        return message if is_message(message) else None


def listen(address: str, port: int) -> socket.socket | None:
    """Where process 0 listens; None where another process does, which may say who it is.

    Raises:
      ValueError: this host does not let it listen.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise ValueError(
            f"coordinator {address}: process 0 cannot listen there ({error}); give another port"
        ) from error
    _open.add(listening)
    return listening


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to process 0, which may start later.

    Raises:
      ValueError: there is none within so many seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        why: object = "it answered itself"
        try:
            made = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
            # Where nobody listens yet, a socket may be given this very port, and so find itself.
            if made.getsockname() != made.getpeername():
                made.settimeout(None)
                return made
            made.close()
        except OSError as error:
            why = error
        if time.monotonic() + RETRY_SECONDS > deadline:
            raise ValueError(
                f"coordinator {host}:{port}: no process 0 there within {timeout:g} s ({why}); "
                "start it on that host, open the port, or give it more time"
            )
        time.sleep(RETRY_SECONDS)
