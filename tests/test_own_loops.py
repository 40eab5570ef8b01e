"""Loops of users in two processes, one of which does what the other does not: both say why."""

import socket

import pytest

from tests.train.together import ended, free_address, started

pytestmark = pytest.mark.slow


def run(case, folder, stall_timeout, starts="group"):
    """Exit codes and errors of process 0 and of process 1, which does the case."""
    address = free_address()
    options = [case, str(stall_timeout), starts, str(folder)]
    commands = [["tests.own_loops", address, str(rank), *options] for rank in range(2)]
    with started(commands) as processes:
        return ended(processes)


@pytest.mark.parametrize(
    ("case", "starts", "code", "why"),
    [
        ("raise", "group", 1, "RuntimeError: no such shard"),
        ("raise", "jax", 1, "RuntimeError: no such shard"),
        ("interrupt", "group", 130, "it was interrupted"),
    ],
)
def test_one_that_fails_ends_the_other(case, starts, code, why, tmp_path):
    codes, [other, own] = run(case, tmp_path, 300, starts)
    assert codes == [code, code], (other, own)
    assert f"error: process 1 on {socket.gethostname()} stopped: {why}\n" in other
    assert why in own
    assert ("Traceback" in own) == (case == "raise")


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("early", "left the block"),
        ("save", "(checkpoints.save(i + 1, params, state))"),
        ("collective", '(multihost_utils.sync_global_devices("evaluated"))'),
        ("loader", "(time.sleep(_FOREVER))"),
    ],
)
def test_one_that_the_other_waits_for_ends_both(case, place, tmp_path):
    codes, errors = run(case, tmp_path, 8)
    assert codes == [1, 1], errors
    for error in errors:
        assert "error: no process called progress() for 8 s: process 0: at own_loops.py:" in error
        _, _, of_1 = error.partition("process 1: ")
        assert place in of_1
        assert "after 4 calls of progress()" in of_1
