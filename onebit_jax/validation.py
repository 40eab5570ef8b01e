"""Checks of what users pass in: each says what was wrong, what was expected and how to mend it."""

import math
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from onebit_jax.markers import named_leaves


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_traced(value: Any) -> bool:
    """Whether a number is not known yet: `optax.inject_hyperparams` passes such in."""
    return isinstance(value, jax.core.Tracer)


def _check_number(name: str, value: Any, holds: Callable[[float], bool], expected: str) -> None:
    is_array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)
    if is_array and value.dtype.itemsize < 4:
        raise ValueError(
            f"{name} is an array of {value.dtype}, in which 0.999 may be 1. Hold it in float32: "
            f"optax.inject_hyperparams takes the parameters' dtype, unless it is given "
            f"hyperparam_dtype=jnp.float32."
        )
    if _is_traced(value):
        return
    if not is_real(value) or not (holds(float(value)) and holds(_in_float32(value))):
        raise ValueError(f"{name}={value!r} must be {expected}. Float32 must hold it too.")
    # JAX computes with Python's integers in int32.
    if isinstance(value, int) and abs(value) >= 2**31:
        raise ValueError(f"{name}={value!r} does not fit int32: give a float, {float(value)!r}.")


def is_real(value: Any) -> bool:
    """Whether a value is a real number that a float can hold, infinite ones included."""
    if isinstance(value, jax.Array):
        kinds = jnp.integer, jnp.floating
        return value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return False
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _in_float32(value: Any) -> float:
    # What it is rounded to there may be infinite, or 0, as devices take numbers below the least
    # normal one.
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    return rounded if abs(rounded) >= np.finfo(np.float32).tiny else 0.0


def float32(hyperparameter: jax.typing.ArrayLike) -> jax.Array | float:
    """Keeps a hyperparameter of higher precision from promoting the state.

    Python's floats do not: and 1 - 0.999 in float32 would be off by 1e-5 of itself.
    """
    if isinstance(hyperparameter, jax.Array):
        return hyperparameter.astype(jnp.float32)
    return float(cast(float, hyperparameter))


def check_decay(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is a decay rate, in [0, 1)."""
    expected = "a number in [0, 1), the decay of a running average; 0.9 or 0.999 are usual"
    _check_number(name, value, lambda x: 0 <= x < 1, expected)


def check_share(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is in [0, 1]."""
    _check_number(name, value, lambda x: 0 <= x <= 1, "a number in [0, 1]; 1 is usual")


def check_part(name: str, value: Any, usual: float) -> None:
    """Raises ``ValueError`` unless ``value``, which decides a shape, is in (0, 1]."""
    check_static(name, value)
    expected = f"a number above 0, at most 1, such as {usual}"
    _check_number(name, value, lambda x: 0 < x <= 1, expected)


def check_between(name: str, value: Any, low: float, high: float, usual: float) -> None:
    """Raises ``ValueError`` unless ``value`` is between two numbers, neither included."""
    expected = f"a number in ({low}, {high}); {usual} is usual"
    _check_number(name, value, lambda x: low < x < high, expected)


def check_positive(name: str, value: Any, usual: float) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and above zero."""
    expected = f"a finite number above 0; {usual} is usual"
    _check_number(name, value, lambda x: 0 < x < math.inf, expected)


def check_loss_scale(value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is None or a finite number above zero.

    Of an array only the type is checked: its number may be under way still.
    """
    if value is None:
        return
    if not hasattr(value, "dtype"):
        check_positive("loss_scale", value, usual=2.0**15)
    elif value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"loss_scale has shape {value.shape} and dtype {value.dtype}, expected one floating-"
            f"point number, with which the loss is multiplied."
        )


def check_not_negative(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and at least zero."""
    expected = "a finite number of at least 0; 0 is usual"
    _check_number(name, value, lambda x: 0 <= x < math.inf, expected)


def check_learning_rate(learning_rate: Any, name: str = "learning_rate") -> None:
    """Raises ``ValueError`` for a learning rate that is no finite number; schedules pass."""
    if not callable(learning_rate):
        expected = "a finite number, or a schedule of the number of updates"
        _check_number(name, learning_rate, math.isfinite, expected)


def check_step_count(name: str, value: Any, at_least: int, mend: str) -> None:
    """Raises ``ValueError`` unless ``value`` is an integer of at least ``at_least``."""
    if isinstance(value, (jax.Array, np.generic)):
        is_integer = value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
    else:
        is_integer = _is_int(value)
    if not is_integer:
        raise ValueError(f"{name}={value!r} must be an int (got {type(value).__name__}). {mend}")
    if not _is_traced(value) and int(value) < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}. {mend}")
    # Updates are counted in int32.
    if not _is_traced(value) and int(value) >= 2**31:
        raise ValueError(f"{name} must be below 2**31. {mend}")


def check_delay(delay: Any) -> None:
    """Raises ``ValueError`` unless ``delay`` is 0 or 1."""
    check_static("delay", delay)
    if not _is_int(delay) or delay not in (0, 1):
        raise ValueError(
            f"delay={delay!r} must be 0, an exchange that its update waits for, or 1, one beside "
            f"the gradients of the update after."
        )


def check_flag(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is a bool."""
    check_static(name, value)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")


def check_seed(seed: Any) -> None:
    """Raises ``ValueError`` unless ``seed`` is an int of 32 bits or a PRNG key of JAX."""
    if isinstance(seed, (jax.Array, np.ndarray, np.generic)):
        integer = seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer)
        key = seed.shape == () and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        raw_key = seed.shape == (2,) and seed.dtype == jnp.uint32
        valid = integer or key or raw_key
    else:
        # Of larger ones JAX drops bits, so that two could give the same run.
        valid = _is_int(seed) and 0 <= seed < 2**32
    if not valid:
        raise ValueError(
            f"seed={seed!r} must be an int in [0, 2**32) or a PRNG key: all random bits come from "
            f"it. Give seed=0, say, or jax.random.key(0); the same seed gives the same run."
        )


def check_own_seed(seed: Any) -> None:
    """Raises ``ValueError`` unless ``seed`` is an int of 32 bits, and not traced."""
    check_static("seed", seed)
    if not _is_int(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be an int in [0, 2**32), such as 0.")


def check_static(name: str, value: Any) -> None:
    """Raises ``ValueError`` for an option that decides what program is compiled and is traced."""
    if _is_traced(value):
        raise ValueError(
            f"{name} is traced, but decides what program is compiled: in optax.inject_hyperparams "
            f"name it among static_args."
        )


def check_bits(name: str, bits: Any, allowed: tuple[int, ...]) -> None:
    """Raises ``ValueError`` unless ``bits`` is a number of bits that an exchange can send."""
    check_static(name, bits)
    if not _is_int(bits) or bits not in allowed:
        *others, last = map(str, allowed)
        raise ValueError(f"{name}={bits!r} must be {', '.join(others)} or {last}, bits per value.")


def _is_one_of(value: Any, *names: str) -> bool:
    # What is no string may not even tell whether it is equal to one.
    return isinstance(value, str) and value in names


def check_name(option: str, value: Any, *names: str) -> None:
    """Raises ``ValueError`` unless ``value`` is one of the names that an option takes."""
    if not _is_one_of(value, *names):
        raise ValueError(f"{option}={value!r} must be {' or '.join(map(repr, names))}.")


def _short(value: Any) -> str:
    """A value of the wrong type; of a tree of arrays, which may be large, the type alone."""
    shown = repr(value)
    return shown if len(shown) <= 200 else f"<a {type(value).__name__}>"


def check_transformation(name: str, tx: Any) -> None:
    """Raises ``ValueError`` unless ``tx`` is a gradient transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"{name}={_short(tx)} must be an Optax gradient transformation, such as "
            f"optax.adamw(1e-3)."
        )


def check_mesh(mesh: Any) -> None:
    """Raises ``ValueError`` unless ``mesh`` is a mesh of devices without manual axes."""
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.abstract_mesh.manual_axes:
        raise ValueError(
            f"mesh={_short(mesh)} must be a mesh of devices, not an abstract one, with axes of "
            f"type Auto or Explicit, such as jax.make_mesh((8,), ('data',))."
        )


def check_workers_mesh(mesh: Any) -> None:
    """Raises ``ValueError`` unless ``mesh`` is one of devices, or of workers to simulate."""
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        check_mesh(mesh)
    elif mesh.empty or mesh.manual_axes:
        raise ValueError(
            f"mesh={mesh!r} has no devices, so that its workers are simulated on one; it must then "
            f"have axes, and none that is manual, as jax.sharding.AbstractMesh((8,), ('data',))."
        )
    elif jax.process_count() > 1:
        raise ValueError(
            f"mesh={mesh!r} has no devices, so that its workers are simulated on one, but there "
            f"are {jax.process_count()} processes: give a mesh of their devices, such as "
            f"jax.make_mesh((jax.device_count(),), ('data',)), or start one process."
        )


def check_scale(scale: Any) -> None:
    """Raises ``ValueError`` unless ``scale`` is one that the compressor has."""
    check_name("scale", scale, "rms", "mean_abs")


def check_residual_dtype(residual_dtype: Any) -> None:
    """Raises ``ValueError`` for a dtype that residuals are not kept in."""
    if not _is_one_of(residual_dtype, "float32", "bfloat16"):
        raise ValueError(
            f"residual_dtype={residual_dtype!r} must be 'float32' or 'bfloat16': in float16 small "
            f"residuals would underflow."
        )


def check_form(form: Any) -> None:
    """Raises ``ValueError`` unless ``form`` is one that an exchange has."""
    check_name("form", form, "auto", "one-stage", "two-stage")


def check_local_dtype(local_dtype: Any, axis_name: Any) -> None:
    """Raises ``ValueError`` for a dtype in which a node's devices, if any, cannot average."""
    check_name("local_dtype", local_dtype, "float32", "bfloat16")
    if local_dtype != "float32" and isinstance(axis_name, str):
        raise ValueError(
            f"local_dtype={local_dtype!r} is for exchanges within a node, but "
            f"axis_name={axis_name!r} is one axis. Give a pair (node_axis, local_axis), or leave "
            f"local_dtype out."
        )


def check_parameters(params: Any) -> None:
    """Raises ``ValueError`` for a leaf that is not a real floating-point array."""
    for name, leaf in named_leaves(params):
        if not hasattr(leaf, "shape"):
            raise ValueError(f"parameter {name} is {leaf!r:.60}, no array: hold it as jnp.asarray.")
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"parameter {name} has dtype {jnp.result_type(leaf)}, but "
                f"an exchange needs real floating-point parameters. Leave it out with "
                f"optax.partition and optax.set_to_zero, or hold it as float32."
            )


def check_gradients(grads: Any) -> None:
    """Raises ``ValueError`` for a leaf that is not a real floating-point array."""
    for name, leaf in named_leaves(grads):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"gradient {name} has dtype {jnp.result_type(leaf)}, but an exchange needs "
                f"real floating-point gradients: cast it to the dtype of its parameter."
            )


def check_same_tree(updates: Any, state_tree: Any) -> None:
    """Raises ``ValueError`` unless gradients have the structure and shapes that init saw."""
    got, seen = (
        {name: leaf.shape for name, leaf in named_leaves(tree)} for tree in (updates, state_tree)
    )
    if got == seen:
        return
    differing = sorted(name for name in got.keys() | seen.keys() if got.get(name) != seen.get(name))
    name = differing[0]
    raise ValueError(
        f"the parameter tree changed since init: {len(differing)} leaves differ, the first of them "
        f"{name}: {seen.get(name, 'absent')} at init, {got.get(name, 'absent')} now. Call init "
        f"again for the new parameters."
    )


def check_weight_decay(weight_decay: Any) -> None:
    """Raises ``ValueError`` for a decay below zero or no finite number; schedules pass."""
    if not callable(weight_decay):
        expected = "a finite number of at least 0, or a schedule of the number of updates"
        _check_number("weight_decay", weight_decay, lambda x: 0 <= x < math.inf, expected)


def checked_mask(mask: Any, option: str = "mask") -> Any:
    """A mask of parameters, of booleans; what a function returns is checked when it does.

    Raises:
      ValueError: for anything else than booleans; later, for a function's result that is no tree
        of booleans like the parameters, or a prefix of one.
    """
    expected = "a tree of booleans like the parameters, a prefix of one, or a function of them"

    def check_leaves(given: Any, what: str) -> None:
        for name, x in named_leaves(given, what):
            if not isinstance(x, (bool, np.bool)):
                raise ValueError(f"{name} is {x!r:.60}; {option} must be {expected}.")

    def of_params(params: Any) -> Any:
        given, what = (
            (mask(params), f"the result of {option}") if callable(mask) else (mask, option)
        )
        check_leaves(given, what)
        try:
            jax.tree.map(lambda *_: None, given, params)
        except ValueError as error:
            named = f"{what} has another structure than the parameters; {option} must be {expected}"
            raise ValueError(f"{named}: {error}") from error
        return given

    if not callable(mask):
        check_leaves(mask, option)
    return None if mask is None else of_params


def check_coefficient_bounds(min_coeff: Any, max_coeff: Any) -> None:
    """Raises ``ValueError`` unless 1-bit LAMB's bounds are finite, above zero and in order."""
    check_positive("min_coeff", min_coeff, usual=0.01)
    check_positive("max_coeff", max_coeff, usual=10.0)
    if _is_traced(min_coeff) or _is_traced(max_coeff):
        return
    if float(min_coeff) > float(max_coeff):
        raise ValueError(f"min_coeff={min_coeff!r} must be at most max_coeff={max_coeff!r}.")


def check_ratio_bounds(min_ratio: Any, max_ratio: Any, ratio_threshold: Any) -> None:
    """Raises ``ValueError`` unless 1-bit LAMB's ratio can be 1, where it starts, and can change."""
    expected = "a number in (0, 1]: ratios start at 1, and 0.5 is usual"
    _check_number("min_ratio", min_ratio, lambda x: 0 < x <= 1, expected)
    expected = "a finite number of at least 1: ratios start at 1, and 4.0 is usual"
    _check_number("max_ratio", max_ratio, lambda x: 1 <= x < math.inf, expected)
    expected = "a number in (0, 1), the share by which a ratio may change; 0.1 is usual"
    _check_number("ratio_threshold", ratio_threshold, lambda x: 0 < x < 1, expected)
