"""Writes that end after a save has failed print nothing; other exceptions are told of."""

import asyncio
import functools
import sys
import threading
import types
from typing import Any

import tensorstore

from train.program import _tell_unless_late


def test_a_write_that_ends_after_its_event_loop_was_closed(monkeypatch):
    seen, told = [], []
    quiet = functools.partial(_tell_unless_late, told.append)

    def hook(unraisable):
        seen.append(str(unraisable.exc_value))
        quiet(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    promise, future = tensorstore.Promise.new()

    async def write():
        await future

    loop = asyncio.new_event_loop()
    # The loop is closed while it is pending.
    writing: Any = loop.create_task(write())
    writing._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    ending = threading.Thread(target=promise.set_result, args=[1])
    ending.start()
    ending.join()
    assert seen == ["Event loop is closed"]
    assert told == []
    assert not writing.done()
    other = types.SimpleNamespace(exc_value=ValueError("of somebody else"))
    quiet(other)
    assert told == [other]
