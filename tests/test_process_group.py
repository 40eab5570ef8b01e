"""Processes of a group: what they find out about one another, and how one ends all."""

import functools
import re
import signal
import socket
from typing import Any

import pytest

import onebit_jax
from onebit_jax.training.process_messages import as_said, differing
from tests.train.together import ended, free_address, started

WORKER = "tests.group_worker"


def meet(*of_each, timeout="60"):
    """What processes come to, given index, count and the rest for each."""
    address = free_address()
    commands = [[WORKER, address, *map(str, place), timeout, *rest] for *place, rest in of_each]
    with started(commands) as processes:
        return ended(processes)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("places", "seeds", "timeout", "complaint"),
    [
        (
            [(0, 3), (1, 3), (2, 3)],
            "787",
            "60",
            "--seed: 7 on processes 0, 2, 8 on process 1; give all processes the same",
        ),
        slow([(0, 2), (1, 3)], "77", "60", "number of processes: 3 on process 1"),
        slow([(0, 3), (1, 3), (1, 3)], "777", "60", "process id 1: two processes"),
        slow([(0, 2), (0, 2)], "77", "60", "process id 0: two processes"),
        slow([(0, 4), (2, 4)], "77", "6", "processes 1, 3 of 4 did not come within 6 s"),
        ([(1, 2)], "7", "1", "no process 0 there within 1 s"),
    ],
)
def test_all_are_told_why_they_cannot_work_together(places, seeds, timeout, complaint):
    of_each = [(*place, [seed]) for place, seed in zip(places, seeds, strict=True)]
    codes, errors = meet(*of_each, timeout=timeout)
    assert codes == [2] * len(places), errors
    for error in errors:
        assert error.startswith("error: ")
        assert complaint in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("host1", 2, 0), "coordinator_address='host1'"),
        (("host1:99999", 2, 0), "coordinator_address='host1:99999'"),
        ((None, 2, 0), "coordinator_address=None"),
        (("host1:12345", 0, 0), "num_processes=0"),
        (("host1:12345", 2, -1), "process_id=-1"),
        (("host1:12345", 2, 2), "process_id=2 must be from 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, named):
    with pytest.raises(ValueError, match=re.escape(named)), onebit_jax.process_group(*arguments):
        pass


@pytest.mark.parametrize("name", ["timeout", "stall_timeout"])
def test_a_limit_of_no_time_is_refused(name):
    limit: Any = {name: 0}
    with pytest.raises(ValueError, match=name), onebit_jax.process_group(**limit):
        pass


@pytest.mark.parametrize(
    ("same", "named"),
    [
        ({"learning rate": 1e-3}, "same has 'learning rate': 0.001, of types str and float"),
        ({"seed": None}, "same has 'seed': None"),
        ({7: "seed"}, "same has 7: 'seed', of types int and str"),
        (["seed"], "same=['seed'] must be a dict"),
    ],
)
def test_what_is_no_text_is_not_compared(same, named):
    message = re.escape(named)
    with pytest.raises(ValueError, match=message), onebit_jax.process_group(same=same):
        pass
    with (
        onebit_jax.process_group(num_processes=1) as group,
        pytest.raises(ValueError, match=message),
    ):
        group.agree(same)


def test_values_too_many_for_a_message_are_refused():
    as_said({str(name): "x" * 900 for name in range(500)})
    with pytest.raises(ValueError, match=r"same has 600 names and values, .* give a digest"):
        as_said({str(name): "x" * 900 for name in range(600)})


def test_a_long_value_that_differs_is_named_by_its_beginning():
    codes, errors = meet(*((index, 2, [str(index), "leave at length"]) for index in range(2)))
    assert codes == [2, 2]
    for error in errors:
        assert re.match(
            r"error: --seed: 0{100}\.\.\. \(2097152 characters, SHA-256 \w{16}\) on", error
        )
        assert len(error) < 500


@pytest.mark.slow
def test_those_that_agree_on_a_long_value_go_on():
    codes, errors = meet(*((index, 2, ["7", "leave at length"]) for index in range(2)))
    assert (codes, errors) == ([0] * 2, [""] * 2)


@pytest.mark.slow
def test_a_long_reason_is_cut():
    # What the first one prints is read first: it fills the pipe.
    codes, errors = meet((1, 2, ["7", "raise at length"]), (0, 2, ["7", "wait"]))
    assert codes == [1, 1]
    assert "stopped: ValueError: full full" in errors[1]
    assert errors[1].endswith("... (10485772 characters)\n")


def test_those_that_agree_leave_together():
    codes, errors = meet(*((index, 2, ["7"]) for index in range(2)))
    assert (codes, errors) == ([0] * 2, [""] * 2)


@pytest.mark.parametrize(
    ("failing", "how", "code", "why"),
    [
        (1, "raise", 1, "ValueError: the disk is full"),
        slow(0, "raise", 1, "ValueError: the disk is full"),
        slow(1, "interrupt", 130, "it was interrupted"),
        (1, "interrupt twice", 130, "it was interrupted"),
        slow(0, "interrupt twice", 130, "it was interrupted"),
        slow(1, "interrupt the wait for others", 130, "it was interrupted"),
        slow(1, "exit", 7, "it exited with 7"),
    ],
)
def test_one_that_fails_ends_all(failing, how, code, why):
    rest = [["7", how if index == failing else "wait"] for index in range(3)]
    codes, errors = meet(*((index, 3, own) for index, own in enumerate(rest)))
    assert codes == [code] * 3
    assert why in errors.pop(failing)
    for error in errors:
        assert error.strip() == (
            f"error: process {failing} on {socket.gethostname()} stopped: {why}"
        )


@pytest.mark.parametrize(
    ("victim", "how"), [slow(0, "wait"), slow(1, "wait"), slow(0, "fork"), (1, "fork")]
)
def test_one_that_dies_ends_all(victim, how):
    """Also one whose children live on, as those of a data loader."""
    address = free_address()
    commands = [
        [WORKER, address, str(index), "3", "15", "7", how if index == victim else "wait"]
        for index in range(3)
    ]
    with started(commands) as processes:
        _await_agreement(processes)
        if how == "fork":
            assert processes[victim].stdout.readline() == "forked\n"
        processes[victim].send_signal(signal.SIGKILL)
        codes, errors = ended([p for index, p in enumerate(processes) if index != victim])
    assert codes == [1, 1], errors
    for error in errors:
        assert f"error: process {victim}" in error
        assert "ended without a word" in error


@pytest.mark.slow
def test_where_none_goes_on_all_say_where_they_are():
    address = free_address()
    doing = ["wait", "leave", "wait", "wait"]
    commands = [
        [WORKER, address, str(index), "4", "15", "7", own] for index, own in enumerate(doing)
    ]
    with started(commands) as processes:
        _await_agreement(processes)
        processes[3].send_signal(signal.SIGSTOP)
        codes, errors = ended(processes[:3])
    assert codes == [1] * 3, errors
    for error in errors:
        assert "no process called progress() for 5 s: processes 0, 2: at group_worker.py:" in error
        assert "(threading.Event().wait()), after 3 calls of progress(); " in error
        assert "process 1: left the block after 3 calls of progress(); " in error
        assert "process 3: no answer within 3 s. " in error
        assert "at one line" not in error


@pytest.mark.slow
def test_where_all_wait_at_one_line_they_may_run_different_programs():
    codes, errors = meet(*((index, 2, ["7", "wait"]) for index in range(2)))
    assert codes == [1, 1], errors
    for error in errors:
        assert "for 5 s: processes 0, 1: at group_worker.py:" in error
        assert "All are at one line: they may run different programs there" in error


def _await_agreement(processes):
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "agreed\n"


def test_what_differs_is_named_with_who_has_it():
    said = {index: {"--seed": "0", "jax": "0.10.2"} for index in range(12)}
    assert differing(said) is None
    said[5] = {"--seed": "1"}
    assert differing(said) == (
        "--seed: 0 on processes 0, 1, 2, 3, 4, 6, 7, 8 and 3 more, 1 on process 5; "
        "jax: 0.10.2 on processes 0, 1, 2, 3, 4, 6, 7, 8 and 3 more, nothing on process 5; "
        "give all processes the same"
    )
