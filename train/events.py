"""Scalars for TensorBoard, written by the thread that logs them.

tensorboardX's own `SummaryWriter` hands them to a thread; where that one fails, as on a full disk,
the next calls wait for it for ever.
"""

import pathlib
import time
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

_messages: Any = event_pb2


class Events:
    """A file of events of its own in a folder.

    Args:
        folder: of the run.
        first_step: what other files of the folder have from this step on is void.
    """

    def __init__(self, folder: pathlib.Path, first_step: int):
        self._writer = EventsWriter(str(folder / "events"))
        started = _messages.SessionLog(status=_messages.SessionLog.START)
        self._writer.write_event(_messages.Event(step=first_step, session_log=started))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds a number; raises ``OSError`` where the file cannot be written."""
        scalar = summary.scalar(name, value)
        self._writer.write_event(_messages.Event(step=step, wall_time=time.time(), summary=scalar))

    def flush(self) -> None:
        """Brings all to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Brings all to disk, and ends the file."""
        self._writer.close()
