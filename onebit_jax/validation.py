"""Checks of what users pass in: each says what was wrong, what was expected and how to mend it."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from onebit_jax.markers import named_leaves

# What a number may be, by the kind of argument: a rule, the rule in words, and a usual value.
_KINDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "decay": (lambda x: 0 <= x < 1, "in [0, 1), the decay of a running average, such as 0.9"),
    "share": (lambda x: 0 <= x <= 1, "in [0, 1], such as 1"),
    "part": (lambda x: 0 < x <= 1, "above 0 and at most 1, such as 0.01"),
    "threshold": (lambda x: 0 < x < 1, "above 0 and below 1, such as 0.55"),
    "positive": (lambda x: 0 < x < math.inf, "finite and above 0, such as 1.0"),
    "not negative": (lambda x: 0 <= x < math.inf, "finite and at least 0, such as 0.01"),
    "at least 1": (lambda x: 1 <= x < math.inf, "finite and at least 1, such as 4.0"),
    "finite": (math.isfinite, "finite, such as 1e-3"),
}


def _traced(value: Any) -> bool:
    """Whether a number is not known yet: `optax.inject_hyperparams` passes such in."""
    return isinstance(value, Tracer)


def number(name: str, value: Any, kind: str) -> Any:
    """A hyperparameter as a float, or traced in float32, which keeps it from promoting a state.

    Args:
      name: the argument's.
      value: anything that ``float`` takes, or a traced scalar.
      kind: of those in this module's table.

    Raises:
      ValueError: for no number, or one that the kind excludes, in float32 too.

    >>> number("b1", np.array(0.9), "decay")
    0.9
    >>> number("b1", 1.0, "decay")
    Traceback (most recent call last):
    ValueError: b1=1.0 must be a number in [0, 1), the decay of a running average, such as 0.9.
    """
    holds, expected = _KINDS[kind]
    if _traced(value):
        if value.dtype.itemsize < 4:
            raise ValueError(
                f"{name} is traced in {value.dtype}, in which 0.999 is 1: give "
                f"optax.inject_hyperparams hyperparam_dtype=jnp.float32."
            )
        return value.astype(jnp.float32)
    try:
        refused = isinstance(value, (str, bytes, bool, np.complexfloating))
        found = math.nan if refused else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(found))
    # Devices take numbers below the least normal one for 0.
    rounded = rounded if abs(rounded) >= np.finfo(np.float32).tiny else 0.0
    if not (holds(found) and holds(rounded)):
        raise ValueError(f"{name}={value!r} must be a number {expected}.")
    return found


def rate(name: str, value: Any, kind: str = "finite") -> Any:
    """As :func:`number`, or a schedule of the number of updates, which passes."""
    return value if callable(value) else number(name, value, kind)


def count(name: str, value: Any, at_least: int, usual: str, *, traced: bool = False) -> Any:
    """Anything that ``operator.index`` takes as an int, of at least ``at_least``, below ``2**31``.

    Args:
      name: the argument's.
      value: the number; where ``traced``, also a traced one.
      at_least: the least number.
      usual: what to give, for the message.
      traced: whether the number may be traced; others decide what program is compiled.

    >>> count("warmup", np.array(5), 1, "500 are usual")
    5
    """
    if _traced(value):
        if traced and jnp.issubdtype(value.dtype, jnp.integer):
            return value
        raise ValueError(
            f"{name} is traced, but decides what is compiled: name it among the static_args of "
            f"optax.inject_hyperparams."
        )
    found = _index(value)
    if not at_least <= found < 2**31:
        raise ValueError(f"{name}={value!r} must be an int of at least {at_least}: {usual}.")
    return found


def _index(value: Any) -> int:
    """A whole number as an int; -1 for anything else."""
    try:
        return operator.index(value) if not isinstance(value, bool) else -1
    except TypeError:
        return -1


def bits(name: str, value: Any, allowed: tuple[int, ...]) -> int:
    """A number of bits that an exchange can send."""
    *others, last = map(str, allowed)
    usual = f"{', '.join(others)} or {last}, bits per value"
    found = count(name, value, 1, usual)
    if found not in allowed:
        raise ValueError(f"{name}={value!r} must be {usual}.")
    return found


def check_name(option: str, value: Any, *names: str) -> None:
    """Raises ``ValueError`` unless ``value`` is one of the names that an option takes."""
    if not (isinstance(value, str) and value in names):
        raise ValueError(f"{option}={value!r:.60} must be {' or '.join(map(repr, names))}.")


def check_seed(seed: Any) -> None:
    """Raises ``ValueError`` unless ``seed`` is an int of 32 bits or a PRNG key of JAX."""
    dtype = getattr(seed, "dtype", np.dtype(np.int32))
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32 or _traced(seed)
    # Of larger ints JAX drops bits, so that two could give the same run.
    if not is_key and not 0 <= _index(seed) < 2**32:
        raise ValueError(
            f"seed={seed!r} must be an int in [0, 2**32) or a PRNG key, such as jax.random.key(0)."
        )


def check_transformation(name: str, tx: Any) -> None:
    """Raises ``ValueError`` unless ``tx`` is a gradient transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(f"{name}, a {type(tx).__name__}, must be an Optax transformation.")


def check_mesh(mesh: Any, *, simulated: bool = False) -> None:
    """Raises ``ValueError`` unless ``mesh`` is one of devices, or of workers to ``simulated``."""
    abstract = isinstance(mesh, jax.sharding.AbstractMesh) and bool(mesh.shape)
    one = simulated and jax.process_count() == 1
    if not isinstance(mesh, jax.sharding.Mesh) and not (one and abstract):
        raise ValueError(
            f"mesh={mesh!r:.100} must be a mesh of devices, such as jax.make_mesh((8,), ('data',))"
            + one * ", or jax.sharding.AbstractMesh((8,), ('data',)) for simulated workers"
        )


def _check_floating(kind: str, tree: Any, mend: str) -> None:
    for name, leaf in named_leaves(tree):
        dtype = None if isinstance(leaf, jax.ShapeDtypeStruct) else getattr(leaf, "dtype", None)
        if dtype is None and isinstance(leaf, (int, float)):
            dtype = jnp.result_type(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            what = f"has dtype {dtype}" if dtype is not None else f"is a {type(leaf).__name__}"
            raise ValueError(
                f"{kind} {name} {what}, but an exchange needs real floating-point arrays. {mend}"
            )


def check_parameters(params: Any) -> None:
    """Raises ``ValueError`` for a leaf that is not a real floating-point array."""
    mend = "Leave it out by optax.partition or eqx.filter, or hold it as float32."
    _check_floating("parameter", params, mend)


def check_gradients(grads: Any) -> None:
    """Raises ``ValueError`` for a leaf that is not a real floating-point array."""
    _check_floating("gradient", grads, "Cast it to the dtype of its parameter.")


def check_same_tree(tree: Any, like: Any) -> None:
    """Raises ``ValueError`` unless gradients or parameters are those that ``init`` was given."""
    got, seen = ({name: leaf.shape for name, leaf in named_leaves(x)} for x in (tree, like))
    if got != seen:
        name, *_ = differing = sorted({x for x, _ in got.items() ^ seen.items()})
        raise ValueError(
            f"the parameter tree changed since init: {len(differing)} leaves differ, the first of "
            f"them {name}: {seen.get(name, 'absent')} at init, {got.get(name, 'absent')} now."
        )


def checked_mask(mask: Any, option: str = "mask") -> Any:
    """A function that gives the mask of parameters: a tree of booleans, or a prefix of one.

    As for Optax a mask is a tree if its leaves are no functions, though it may be a module that can
    be called; None stays None.
    """
    if mask is None:
        return None
    is_tree = not any(map(callable, jax.tree.leaves(mask)))

    def of_params(params: Any) -> Any:
        given = mask if is_tree else mask(params)
        for name, x in named_leaves(given):
            if not isinstance(x, (bool, np.bool)):
                raise ValueError(
                    f"{option} has the leaf {name} = {x!r:.60}; it must be a tree of booleans like "
                    f"the parameters, a prefix of one, or a function of them."
                )
        return given

    if is_tree:
        of_params(None)
    return of_params
