"""The manifest of a checkpoint, which is checked before anything is restored."""

import collections
import contextlib
import importlib
import json
import math
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax.checkpoint import workers
from onebit_jax.markers import nodes

# Raised with every change of what a state of this library holds, or of what is written here:
# tests/checkpoint/test_hostile_format.py tells of one.
FORMAT = 11
# Their modules say their versions; metadata are missing where a checkout is on the path, or in an
# archive of a program.
_PACKAGES = ("onebit_jax", "jax", "optax", "orbax.checkpoint", "numpy")


class DamagedError(Exception):
    """A checkpoint that cannot be read, or is not what was written."""


def encoded(content: Any) -> str:
    """JSON text that contains a checksum of its content.

    Raises:
      TypeError: for what JSON cannot hold, and for keys that would come back as strings.
      ValueError: for what holds itself.
      RecursionError: for what is nested too deep.
    """
    text = json.dumps(content, sort_keys=True)
    _check_keys(content)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "content": content})


def read(path: pathlib.Path) -> Any:
    """The content of a file that :func:`encoded` made.

    Raises:
      DamagedError: the file is missing, is no JSON, or is not what was written.
    """
    try:
        held = json.loads(path.read_bytes())
        text = json.dumps(held["content"], sort_keys=True)
        if held["crc32"] == zlib.crc32(text.encode()):
            return held["content"]
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from error
    raise DamagedError(f"{path.name} is not what was written")


def _check_keys(content: Any) -> None:
    if isinstance(content, dict):
        for key in content:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no string, and would come back as one")
    inner = content.values() if isinstance(content, dict) else content
    for x in inner if isinstance(content, (dict, list, tuple)) else ():
        _check_keys(x)


def check_leaves(tree: Any) -> None:
    """Raises ``ValueError`` for a leaf that is neither an array nor a number, or named as another.

    Orbax joins the names of nodes by dots, the manifest by slashes.
    """
    for separator in "/.":
        named = collections.Counter(
            jax.tree_util.keystr(path, simple=True, separator=separator)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        )
        if twice := [name for name, times in named.items() if times > 1]:
            raise ValueError(
                f"two arrays would both be saved as {twice[0]!r}: give one of their nodes another "
                f"name, without {separator!r} in it."
            )
    for name, x in leaves(tree):
        known = hasattr(x, "dtype") or isinstance(x, (bool, int, float))
        try:
            jnp.result_type(x)
        except TypeError:
            known = False
        if not known:
            raise ValueError(
                f"{name} is {x!r:.60}, of type {type(x).__name__}, but only arrays and real "
                f"numbers are saved as such: give it as extra."
            )


def check_places(tree: Any) -> None:
    """Raises ``ValueError`` for an array that is on the devices of one of several processes."""
    for name, x in leaves(tree):
        if isinstance(x, jax.Array) and jax.process_count() > 1 and not _on_all_processes(x):
            raise ValueError(
                f"{name} is not on a mesh of all processes, which save it together: place it there "
                f"by jax.device_put(numpy.asarray(x), jax.NamedSharding(mesh, jax.P()))."
            )


def _on_all_processes(x: jax.Array) -> bool:
    # JAX 0.10.2 makes an array without addressable shards where it moves one of this process's
    # devices to such a mesh.
    with contextlib.suppress(ValueError):
        return bool(x.addressable_shards) and not x.is_fully_addressable
    return False


def describe(step: int, tree: Any) -> dict[str, Any]:
    """The manifest of a tree of arrays after so many steps."""
    return {
        "format": FORMAT,
        "step": step,
        "versions": {name: importlib.import_module(name).__version__ for name in _PACKAGES},
        "processes": jax.process_count(),
        "axes": workers.axes(tree),
        "splits": workers.splits(tree),
        "types": types(tree),
        "plans": plans(tree),
        "arrays": arrays(tree),
    }


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names."""
    return [(_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def arrays(tree: Any) -> dict[str, list[Any]]:
    """The dtype and the shape of each leaf."""
    # JAX without 64 bits calls NumPy's float64 arrays float32.
    dtypes = {name: getattr(x, "dtype", None) or jnp.result_type(x) for name, x in leaves(tree)}
    return {name: [str(dtypes[name]), list(np.shape(x))] for name, x in leaves(tree)}


def types(tree: Any) -> dict[str, str]:
    """The types of the nodes that are neither dicts, lists nor plain tuples."""
    return {
        _name(path): type(node).__name__
        for path, node in nodes(tree)
        if type(node) not in (dict, list, tuple)
    }


def plans(tree: Any) -> dict[str, dict[str, int]]:
    """When states exchange, for those that say so, as of :func:`onebit_jax.local_steps`."""
    return {
        _name(path): {
            **{field: workers.shared_int(x) for field, x in node.plan._asdict().items()},
            "since_sync": workers.shared_int(node.since_sync),
        }
        for path, node in nodes(tree)
        if hasattr(node, "check_plan")
    }


def check_format(manifest: Any, where: str) -> None:
    """Checks that a manifest is one that :func:`describe` of this version made.

    Args:
      manifest: what was read.
      where: the checkpoint, for messages.

    Raises:
      ValueError: it is of another version.
      DamagedError: it is not a manifest.
    """
    known = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(known, int) and known != FORMAT:
        raise ValueError(
            f"{where} has the format {known}, this version of onebit_jax reads {FORMAT}: it was "
            f"written by onebit_jax and others of the versions {manifest.get('versions')}. Install "
            f"those, an earlier commit of onebit_jax if its version is the same here, or begin in "
            f"another folder."
        )
    match manifest:
        case {
            "format": int(),
            "processes": int(processes),
            "axes": list(axes),
            "splits": dict(),
            "types": dict(),
            "plans": dict(plans),
            "arrays": dict(arrays),
            "metric": None | int() | float(),
        } if (
            processes > 0
            and all(isinstance(x, list) and len(x) == 2 for x in (*axes, *arrays.values()))
            and all(isinstance(size, int) and size > 0 for _, size in axes)
            and all(isinstance(shape, list) for _, shape in arrays.values())
            and all(isinstance(plan, dict) for plan in plans.values())
        ):
            return
    raise DamagedError("the manifest is not one of onebit_jax's")


def check(manifest: Any, tree: Any, where: str) -> None:
    """Checks that a checkpoint fits a tree and its number of workers.

    Args:
      manifest: the checkpoint's.
      tree: what is to be restored, or its shapes.
      where: the checkpoint, for messages.

    Raises:
      ValueError: it does not. The message names what differs, and says what to do.
    """
    before, now = manifest["axes"], workers.axes(tree)
    if workers.differ(before, now):
        slow = workers.slow_names(tree) or [name for name, _ in now]
        fast = [name for name, _ in now if name not in slow]
        was, has = (_workers(axes, fast) for axes in (before, now))
        depends, mend = "their number", "as many"
        if sorted(x for x in before if x[1] > 1) == sorted(x for x in now if x[1] > 1):
            depends, mend = "the order of the mesh's axes", "a mesh of the same axes in that order"
        raise ValueError(
            f"{where} was saved by {was}, this run has {has}: what each worker has for itself "
            f"depends on {depends}. Go on with {mend}, or give restore tx=, the optimizer, to "
            f"convert the state."
        )
    saved, here = manifest["types"], types(tree)
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"{where} is of another tree: {name} is a {saved.get(name, 'plain node')} there "
                f"and a {here.get(name, 'plain node')} here. It was saved with another optimizer, "
                f"or other options of it: go on with those, or begin in another folder."
            )
    wanted = arrays(tree)
    for name in sorted(manifest["arrays"].keys() | wanted.keys()):
        dtype, shape = manifest["arrays"].get(name, (None, None))
        if [dtype, shape] != wanted.get(name, [None, None]):
            raise ValueError(
                f"{where} is of another tree: {name} {_in_words(dtype, shape)} there and "
                f"{_in_words(*wanted.get(name, [None, None]))} here. It was saved with another "
                f"model, other options of the optimizer or another number of simulated workers: "
                f"go on with those, or begin in another folder."
            )
    for path, node in nodes(tree):
        plan = manifest["plans"].get(_name(path))
        if plan and not isinstance(node.since_sync, jax.ShapeDtypeStruct):
            saved = {field: jnp.int32(plan[field]) for field in node.plan._fields}
            expected = [jnp.int32(workers.shared_int(x)) for x in node.plan]
            node._replace(
                plan=type(node.plan)(**saved), since_sync=jnp.int32(plan["since_sync"])
            ).check_plan(type(node.plan)(*expected))


def check_splits(manifest: Any, tree: Any, where: str) -> None:
    """Checks that a model is split over fast axes as it was when it was saved.

    Raises:
      ValueError: it is not; arguments are those of :func:`check`, the tree as it is to be.
    """
    now, slow = workers.axes(tree), workers.slow_names(tree)
    fast = {name for name, size in now if size > 1 and name not in slow}
    if not fast or not fast <= {name for name, _ in manifest["axes"]}:
        return  # whole, or on axes of other names
    saved, here = manifest["splits"], workers.splits(tree)
    shapes = arrays({"params": tree["params"]})
    for name in sorted(saved.keys() & here.keys() & manifest["arrays"].keys()):
        was, is_now = (
            _over(fast, axes, parts[name])
            for axes, parts in ((manifest["axes"], saved), (now, here))
        )
        # Only one of them may have an axis of workers.
        more = len(manifest["arrays"][name][1]) - len(shapes[name][1])
        if _stripped(was[max(more, 0) :]) != _stripped(is_now[max(-more, 0) :]):
            raise ValueError(
                f"{where} is of a model that was split otherwise: the axes of {name} lay along "
                f"{saved[name]} of the mesh axes {[x for x, _ in manifest['axes']]} and are to lie "
                f"along {here[name]} of {[x for x, _ in now]}, but the optimizer's state holds "
                f"each device's part. Go on with the mesh and the param_specs that it was saved "
                f"with."
            )


def _over(fast: set[str], axes: list[list[Any]], parts: list[list[str]]) -> list[list[int]]:
    """What splits the axes of an array, of the fast axes, each by its place among these."""
    order = [name for name, _ in axes if name in fast]
    return [[order.index(name) for name in part if name in fast] for part in parts]


def _stripped(parts: list[list[int]]) -> list[list[int]]:
    last = max((i for i, part in enumerate(parts) if part), default=-1)
    return parts[: last + 1]


def _workers(axes: list[list[Any]], fast: list[str]) -> str:
    count = math.prod(size for name, size in axes if name not in fast)
    form = f" ({', '.join(f'{name} {size}' for name, size in axes)})" if len(axes) > 1 else ""
    return f"{count} workers{form}"


def _in_words(dtype: str | None, shape: list[int] | None) -> str:
    return "is absent" if shape is None else f"has shape {tuple(shape)} and dtype {dtype}"


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
