"""The budget of the code: how much of it there may be."""

from typing import NamedTuple

from benchmarks.count_lines import count, measures, tree


class Limit(NamedTuple):
    """A limit."""

    measure: str
    limit: int


BUDGET = [
    Limit("onebit_jax: lines", 7_000),
    Limit("onebit_jax: files", 70),
    Limit("onebit_jax: lines of the longest module", 300),
    Limit("onebit_jax: lines of the longest function", 80),
    Limit("onebit_jax: exported names", 35),
    Limit("parameters of onebit_adam", 11),
    Limit("parameters of all that make a transformation", 200),
    Limit("train: lines", 4_000),
    Limit("tests: lines", 14_000),
    Limit("benchmarks: lines", 3_000),
]


def test_the_code_is_within_its_budget():
    """Shorten the code, not the list."""
    measured = measures(tree())
    assert measured.keys() == {limit.measure for limit in BUDGET}
    exceeded = [x for x in BUDGET if measured[x.measure] > x.limit]
    assert not exceeded, {x.measure: measured[x.measure] for x in exceeded}


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
