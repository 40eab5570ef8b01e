"""The budget of the code: how much of it there may be."""

from typing import NamedTuple

import pytest

from benchmarks.count_lines import count, measures, tree


class Limit(NamedTuple):
    """A limit; where it does not hold yet, the one that holds today."""

    measure: str
    limit: int
    today: int | None = None


BUDGET = [
    Limit("onebit_jax: lines", 7_000, today=12_400),
    Limit("onebit_jax: files", 70, today=118),
    Limit("onebit_jax: lines of the longest module", 300),
    Limit("onebit_jax: lines of the longest function", 80),
    Limit("onebit_jax: exported names", 35, today=66),
    Limit("parameters of onebit_adam", 11, today=14),
    Limit("parameters of all that make a transformation", 200, today=217),
    Limit("train: lines", 4_000, today=4_600),
    Limit("tests: lines", 14_000, today=19_300),
    Limit("benchmarks: lines", 3_000),
]


@pytest.fixture(scope="module")
def measured():
    return measures(tree())


@pytest.mark.parametrize("limit", BUDGET, ids=lambda x: x.measure)
def test_the_code_is_within_its_budget(limit, measured):
    assert measured[limit.measure] <= (limit.today or limit.limit), "shorten the code"


def test_every_measure_has_a_limit(measured):
    assert measured.keys() == {limit.measure for limit in BUDGET}


def test_only_code_counts():
    module = count('''
"""A module."""

# A comment.
def f(x):
    """A function."""
    def g(y):
        return """no
docstring"""

    return g(x)


class A:
    """A class."""
''')
    assert module.lines == 6
    assert module.functions == {"5 f": 5, "7 g": 3}
