"""Loops of users in two processes, one of which does what the other does not: both say why."""

import socket

import pytest

from benchmarks.own_loops import run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "starts_jax", "code", "why"),
    [
        ("raise", False, 1, "RuntimeError: no such shard"),
        ("raise", True, 1, "RuntimeError: no such shard"),
        ("interrupt", False, 130, "it was interrupted"),
    ],
)
def test_one_that_fails_ends_the_other(case, starts_jax, code, why):
    codes, [other, own], _ = run(case, stall_timeout=300, starts_jax=starts_jax)
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
def test_one_that_the_other_waits_for_ends_both(case, place):
    codes, errors, _ = run(case, stall_timeout=8)
    assert codes == [1, 1], errors
    for error in errors:
        assert "error: no process called progress() for 8 s: process 0: at own_loops.py:" in error
        _, _, of_1 = error.partition("process 1: ")
        assert place in of_1
        assert "after 4 calls of progress()" in of_1
