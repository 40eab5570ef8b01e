"""A model's state, such as batch statistics, and the random keys of a training step."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from onebit_jax.markers import is_key, named_leaves
from onebit_jax.programs.collective_check import leaves_with_axes


def with_own_keys(model_state: Any, index: jax.Array) -> Any:
    """Folds a worker's index into random keys; other leaves stay as they are."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, index) if is_key(x) else x, model_state)


def with_keys_of(given: Any, new: Any) -> Any:
    """Puts the keys that all workers share back in the place of each worker's keys."""
    return jax.tree.map(lambda old, x: old if is_key(old) else x, given, new)


def remains_finite(given: Any, new: Any) -> jax.Array:
    """Whether no float of a model's state, as one worker has it, has become NaN or infinite."""
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(new), strict=True)
    became = [
        jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y))
        for x, y in pairs
        if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    ]
    # Not jnp.array of an empty list, whose constant ends XLA's compiler with a segmentation fault
    # (jaxlib 0.11.2, not reported).
    return ~jnp.any(jnp.stack(became)) if became else jnp.bool(True)


def differs(x: Any) -> bool:
    """Whether a leaf may differ between workers: floats, which are averaged, and random keys."""
    return is_key(x) or bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def partition(model_state: Any) -> tuple[Any, Any]:
    """The leaves that may differ between workers, and the others; each with None for the rest."""
    return (
        jax.tree.map(lambda x: x if differs(x) else None, model_state),
        jax.tree.map(lambda x: None if differs(x) else x, model_state),
    )


def combine(of_worker: Any, in_common: Any) -> Any:
    """Undoes :func:`partition`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, of_worker, in_common, is_leaf=lambda x: x is None
    )


def check_same_state(new: Any, given: Any) -> None:
    """Checks the state that a loss returned against the state that it was given.

    Raises:
      ValueError: for another structure, other shapes or dtypes, and for another random key.
    """
    got, wanted = _described(new), _described(given)
    if got != wanted or jax.tree.structure(new) != jax.tree.structure(given):
        name = next((x for x in wanted | got if got.get(x) != wanted.get(x)), None)
        difference = f"it is a {type(new).__name__}, or has nodes of other types"
        if name is not None:
            was = wanted.get(name, "not there")
            difference = f"{name} is {got.get(name, 'missing')}, and was {was}"
        raise ValueError(
            f"loss_fn returned a model_state of other structure, shapes or dtypes than it was "
            f"given: {difference}. Return all of it, changed or not, and no parameters."
        )
    for (name, x), y in zip(named_leaves(given), jax.tree.leaves(new), strict=True):
        if is_key(x) and x is not y:
            raise ValueError(
                f"loss_fn changed the random key model_state{name}, of which "
                f"every worker has its own version: it would be lost. Leave it as it is and count "
                f"what was drawn, as Flax NNX does, or take the key that step(..., rng=key) gives."
            )


def _described(tree: Any) -> dict[str, str]:
    """Shape and dtype of each leaf, by its name."""
    leaves = named_leaves(tree, "model_state")
    return {name: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for name, x in leaves}


def check_random_keys(rng: Any, batch: Any) -> None:
    """Checks the random keys that a step is given.

    Args:
      rng: one key for all workers, into which each folds its index; or None.
      batch: a tree of global arrays, whose keys must differ.

    Raises:
      ValueError: for an ``rng`` that is not one key; for keys in a batch that are the same for two
        rows of it.
    """
    if rng is not None:
        shape, dtype = jnp.shape(rng), jnp.result_type(rng)
        raw = shape == (2,) and dtype == jnp.uint32
        if not (raw or (shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key))):
            raise ValueError(
                f"rng has shape {shape} and dtype {dtype}, expected one random key, such as "
                f"jax.random.fold_in(jax.random.key(0), step_number): every worker makes its own "
                f"of it. Keys for each row go into the batch."
            )
    for name, leaf in named_leaves(batch, "batch"):
        known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if not known or not is_key(leaf):
            continue
        shards = [jax.random.key_data(shard.data) for shard in leaf.addressable_shards]
        rows = np.concatenate([np.asarray(x).reshape(x.shape[0], -1) for x in shards])
        if len(np.unique(rows, axis=0)) < len(rows):
            raise ValueError(
                f"{name} holds the same random key in several rows: "
                f"workers would draw the same numbers. Give each row its own, "
                f"jax.random.split(key, rows), or pass one key as step(..., rng=key), of which "
                f"every worker makes its own."
            )


def check_shared_model_state(varies: Any) -> None:
    """Raises ``ValueError`` for a model's state that would differ between workers.

    Args:
      varies: a tree like the state, of the axes that its leaves vary over.
    """
    for path, over in leaves_with_axes(varies):
        if over:
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} would differ between workers. Float "
                f"leaves are averaged over them; others, integers say, must become the same on "
                f"all, as a count of steps does: keep this one as a float, or make it the same by "
                f"jax.lax.psum, jax.lax.pmax."
            )
