"""What every program does with bad input."""

import pathlib
from collections.abc import Callable, Sequence

import pytest


def assert_refused(
    main: Callable[[list[str]], int],
    options: Sequence[str],
    complaint: str,
    out: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asserts that a program says in one line what is wrong, and that nothing is written."""
    assert main([*options, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("error: ")
    assert complaint in printed.err
    assert not out.exists()
