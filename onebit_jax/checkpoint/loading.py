"""Reads checkpoints, with the same outcome on all processes."""

import contextlib
import gc
import logging
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from onebit_jax.checkpoint import manifest
from onebit_jax.checkpoint.checksums import differing
from onebit_jax.checkpoint.manifest import DamagedError

MANIFEST = "manifest.json"


def own_file(process: int) -> str:
    """The file that one process writes into a checkpoint."""
    return f"process-{process}.json"


def read_manifest(path: pathlib.Path) -> Any:
    """A checkpoint's manifest.

    Raises:
      DamagedError: it cannot be read.
      ValueError: it is of another version.
    """
    written = manifest.read(path / "manifest" / MANIFEST)
    manifest.check_format(written, f"the checkpoint {path}")
    return written


def read(path: pathlib.Path) -> tuple[Any, Any, dict[str, dict[str, int]]]:
    """A checkpoint's manifest, this process's ``extra``, and the checksums of all arrays.

    Raises:
      DamagedError, ValueError: as :func:`read_manifest` does.
    """
    written = read_manifest(path)
    count = written["processes"]
    files = [manifest.read(path / "manifest" / own_file(process)) for process in range(count)]
    sums: dict[str, dict[str, int]] = {}
    try:
        for file in files:
            for name, parts in file["checksums"].items():
                sums.setdefault(name, {}).update(parts)
        return written, files[jax.process_index() % count]["extra"], sums
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedError(f"a process's file is not one of onebit_jax's: {error!r}") from error


def load(path: pathlib.Path, tree: Any, sums: Mapping[str, Mapping[str, int]]) -> Any:
    """The arrays of a checkpoint, in the tree's structure and with its shardings.

    Raises:
      DamagedError: they cannot be read, or are not what was written.
    """
    # Each process reads for itself: one that cannot must not leave the others waiting for it.
    me = jax.process_index()
    context = ocp.Context()
    context.multiprocessing.primary_host = me
    context.multiprocessing.active_processes = {me}
    context.multiprocessing.barrier_sync_key_prefix = f"reader_{me}"
    like, problem = {"state": filled(jax.tree.map(_abstract, tree))}, ""
    with _quiet():
        try:
            with context:
                loaded = ocp.load_checkpointables(str(path), like)["state"]
        # Orbax passes on its libraries' errors, which for a damaged file may be of any type.
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if problem:
            gc.collect()
    if problem:
        raise DamagedError(problem)
    restored = jax.tree.map(_filled_up, loaded, tree, is_leaf=lambda x: x is None)
    got, expected = manifest.arrays(restored), manifest.arrays(tree)
    for name, x in manifest.leaves(restored):
        if got[name] != expected[name] or differing(x, sums.get(name, {})):
            raise DamagedError(f"{name} is not what was written")
    return restored


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging the tasks that it leaves unfinished after a failed read."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before, hook = [logger.disabled for logger in loggers], sys.unraisablehook
    sys.unraisablehook = lambda _: None
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def filled(tree: Any) -> Any:
    """The tree as Orbax can save it: arrays for NumPy's scalars, None for what is empty."""

    def saved(x: Any) -> Any:
        return (np.asarray(x) if isinstance(x, np.generic) else x) if np.size(x) else None

    return jax.tree.map(saved, tree)


def _filled_up(x: Any, like: Any) -> Any:
    """Undoes :func:`filled`."""
    if x is None:
        shapes_alone = isinstance(like, jax.ShapeDtypeStruct)
        return jnp.zeros(like.shape, like.dtype, device=like.sharding) if shapes_alone else like
    return like.dtype.type(x) if isinstance(like, np.generic) else x


def _abstract(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return x


def on_all_processes(f: Callable[..., Any], *arguments: Any) -> Any:
    """What ``f`` returns; raises ``DamagedError`` on all processes if it does on one of them."""
    result = problem = None
    try:
        result = f(*arguments)
    except DamagedError as error:
        problem = error
    if jax.process_count() > 1:
        fine = np.asarray(multihost_utils.process_allgather(np.array(problem is None)))
        if not np.all(fine) and problem is None:
            processes = ", ".join(map(str, np.flatnonzero(~fine)))
            problem = DamagedError(f"process {processes} cannot read it")
    if problem is not None:
        raise problem
    return result
