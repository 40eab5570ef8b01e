"""A process on a host: does what its parent asks through a pipe until the pipe is closed.

    python -m benchmarks.network.worker FILE_DESCRIPTOR

The module that its `Place` names has a class `Worker`, made from the place, with the methods

    prepare(kind)   makes what is timed; the bytes that its program says a step sends, or None
    warm_up()       makes the steps that are not to be timed
    step()          makes one step; seconds
    release()       frees what `prepare` made
"""

import importlib
import multiprocessing.connection
import pathlib
import socket
import sys
import traceback

from benchmarks.network.processes import Place


def sent() -> tuple[int, int]:
    """Bytes and packets that this host's interface has sent since it was made."""
    for line in pathlib.Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == "eth0":
            return int(counts.split()[8]), int(counts.split()[9])
    raise RuntimeError("This host has no eth0.")


def main(file_descriptor: int) -> None:
    """Answers requests: (whether it went well, the answer or what went wrong)."""
    with multiprocessing.connection.Connection(file_descriptor) as pipe:
        try:
            place: Place = pipe.recv()
            # Gloo listens at the address that the host's name resolves to. An address is one
            # without any file of names.
            socket.sethostname(place.address)
            worker = importlib.import_module(place.module).Worker(place)
            pipe.send((True, None))
            while True:
                name, *arguments = pipe.recv()
                answer = sent() if name == "sent" else getattr(worker, name)(*arguments)
                pipe.send((True, answer))
        except EOFError:
            return
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
