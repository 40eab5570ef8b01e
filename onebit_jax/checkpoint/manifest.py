"""What a checkpoint says of itself, so that it is checked before anything is restored."""

import importlib.metadata
import json
import math
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from onebit_jax.markers import is_per_worker

FORMAT = 1
_PACKAGES = ("onebit_jax", "jax", "optax", "orbax-checkpoint", "numpy")


class DamagedError(Exception):
    """A checkpoint that cannot be read, or is not what was written."""


def encoded(content: Any) -> str:
    """JSON with a checksum of its own."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"crc32": zlib.crc32(text.encode()), "content": content})


def read(path: pathlib.Path) -> Any:
    """The content of a file that holds what :func:`encoded` gave.

    Raises:
      DamagedError: the file is missing, no JSON, or another than was written.
    """
    try:
        held = json.loads(path.read_bytes())
        text = json.dumps(held["content"], sort_keys=True)
        if held["crc32"] == zlib.crc32(text.encode()):
            return held["content"]
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path.name} cannot be read: {error}") from error
    raise DamagedError(f"{path.name} is not what was written")


def describe(step: int, tree: Any) -> dict[str, Any]:
    """The manifest of a tree of arrays after so many steps."""
    return {
        "format": FORMAT,
        "step": step,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "processes": jax.process_count(),
        "axes": axes(tree),
        "types": types(tree),
        "plans": plans(tree),
        "arrays": {name: [str(jnp.result_type(x)), list(np.shape(x))] for name, x in leaves(tree)},
    }


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names."""
    return [(_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def axes(tree: Any) -> list[list[Any]]:
    """The axes that workers run along, ``[name, size]`` each; none if that is not to be seen.

    Read from where each worker's own state lies.
    """
    mesh = mesh_of(tree)
    return [[name, size] for name, size in mesh.shape.items()] if mesh else []


def differ(before: list[list[Any]], now: list[list[Any]]) -> bool:
    """Whether axes, where both are known, are of other sizes; what they are called is no matter."""
    return bool(before and now) and [size for _, size in before] != [size for _, size in now]


def mesh_of(tree: Any) -> Any:
    """The mesh that each worker's own state lies on; None if that is not to be seen."""
    for node in filter(is_per_worker, jax.tree.leaves(tree, is_leaf=is_per_worker)):
        for x in jax.tree.leaves(node):
            sharding = getattr(x, "sharding", None)
            if isinstance(sharding, NamedSharding) and len(sharding.spec) and sharding.spec[0]:
                return sharding.mesh
    return None


def types(tree: Any) -> dict[str, str]:
    """The types of the nodes that are neither dicts, lists nor plain tuples."""
    return {
        _name(path): type(node).__name__
        for path, node in _nodes(tree, ())
        if type(node) not in (dict, list, tuple)
    }


def plans(tree: Any) -> dict[str, dict[str, int]]:
    """What states say of when they exchange, as those of :func:`onebit_jax.local_steps`."""
    return {
        _name(path): {
            "every": int(node.plan.every),
            "fragments": int(node.plan.fragments),
            "since_sync": int(node.since_sync),
        }
        for path, node in _nodes(tree, ())
        if hasattr(node, "check_plan")
    }


def check(manifest: Any, tree: Any, where: str) -> None:
    """Checks that a checkpoint is of a tree like this one, but for the number of workers.

    Args:
      manifest: the checkpoint's.
      tree: what is to be restored, or its shapes.
      where: the checkpoint, for messages.

    Raises:
      ValueError: it is not. It names what differs, and says what to do.
    """
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{where} has the format {manifest['format']}, this version of onebit_jax reads "
            f"{FORMAT}: it was written by onebit_jax {manifest['versions']['onebit_jax']}; install "
            f"that, or begin in another folder."
        )
    before, now = manifest["axes"], axes(tree)
    if differ(before, now):
        raise ValueError(
            f"{where} was saved by {_workers(before)}, this run has {_workers(now)}: what each "
            f"worker has for itself belongs to their number. Go on with as many, or give restore "
            f"tx=, the optimizer, to take the state to these."
        )
    saved, here = manifest["types"], types(tree)
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise ValueError(
                f"{where} is of another tree: {name} is a {saved.get(name, 'plain node')} there "
                f"and a {here.get(name, 'plain node')} here. It was saved with another optimizer, "
                f"or other options of it: go on with those, or begin in another folder."
            )
    wanted = {name: [str(jnp.result_type(x)), list(np.shape(x))] for name, x in leaves(tree)}
    for name in sorted(manifest["arrays"].keys() | wanted.keys()):
        dtype, shape = manifest["arrays"].get(name, (None, None))
        if [dtype, shape] != wanted.get(name, [None, None]):
            raise ValueError(
                f"{where} is of another tree: {name} {_in_words(dtype, shape)} there and "
                f"{_in_words(*wanted.get(name, [None, None]))} here. It was saved with another "
                f"model or other options of the optimizer: go on with those, or begin in another "
                f"folder."
            )
    for name, plan in manifest["plans"].items():
        node = {_name(path): x for path, x in _nodes(tree, ())}[name]
        if not isinstance(node.since_sync, jax.ShapeDtypeStruct):
            every, fragments = jnp.int32(plan["every"]), jnp.int32(plan["fragments"])
            node._replace(
                plan=type(node.plan)(every, fragments), since_sync=jnp.int32(plan["since_sync"])
            ).check_plan(node.plan)


def _workers(axes: list[list[Any]]) -> str:
    count = math.prod(size for _, size in axes)
    form = f" ({', '.join(f'{name} {size}' for name, size in axes)})" if len(axes) > 1 else ""
    return f"{count} workers{form}"


def _in_words(dtype: str | None, shape: list[int] | None) -> str:
    return "is absent" if shape is None else f"has shape {tuple(shape)} and dtype {dtype}"


def _nodes(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All nodes that are no leaves, with their paths."""
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and not children[0][0]:
        return
    yield path, tree
    for key, child in children:
        yield from _nodes(child, (*path, *key))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
