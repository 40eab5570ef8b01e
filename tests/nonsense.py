"""What users may pass by mistake, to hold checks of input to."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

_FLAGS = [None, True, False, np.bool_(True)]
_NUMBERS = [0, -1, 2**31, 10**400, 0.0, -0.5, 1e-320, 1e39, math.nan, math.inf, -math.inf, 1j]
_ARRAYS = [np.complex64(1), np.float32(0.5), np.array(0.5), np.array([0.5, 0.5]), np.array("x")]
_JAX_ARRAYS = [jnp.float32(math.nan), jnp.array([1, 2]), jnp.complex64(1j)]
_TEXTS = ["", "rms", "data", "10Gbit", b"data"]
_CONTAINERS = [(), ("node", "local"), ("node", 1), [], [1], {}, {1: 2}, set()]
_FUNCTIONS = [int, len, lambda *_: None, lambda count: count, optax.adam(1e-3)]
_OTHERS = [object(), jax.ShapeDtypeStruct((), jnp.float32)]
VALUES: list[Any] = [*_FLAGS, *_NUMBERS, *_ARRAYS, *_JAX_ARRAYS, *_TEXTS, *_CONTAINERS]
VALUES += [*_FUNCTIONS, *_OTHERS]

values = st.one_of(st.sampled_from(VALUES), st.integers(), st.floats(), st.text(max_size=8))


def arguments(function: Callable[..., Any], usual: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Keywords for a function: the usual ones, of which up to three are nonsense."""
    names = list(inspect.signature(function).parameters)
    wrong = st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)
    return wrong.map(lambda given: usual | given)


def accepts_or_says_why(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Calls it; a `ValueError` or `TypeError` must say something, and nothing else may be raised.

    Returns:
        What it returned, or None.
    """
    try:
        return function(*args, **named)
    except (ValueError, TypeError) as error:
        return assert_says_why(error)


def assert_says_why(error: Exception) -> None:
    """Asserts that an error has a message."""
    assert str(error).strip()
