"""Checkpoints of a run, on Orbax's ``CheckpointManager``: ``pip install '.[checkpoint]'``.

Orbax writes them in the background, all of a checkpoint or nothing, and deletes old ones. What it
lacks is here: a description of the run, which is compared before anything is restored; a checksum
of every file, since Orbax restores arrays in which bits are flipped; another number of workers.
"""

import hashlib
import json
import os
import pathlib
import shutil
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, SingleDeviceSharding

import onebit_jax
from onebit_jax.markers import is_per_worker

# Raised when what this module writes changes. Formats 2 to 11 had a manifest.
FORMAT = 12
# In the description of a run, beside the names of arrays.
_FORMAT, _AXES = "the format", "the mesh of the workers"
_VERSIONS = {"onebit_jax": onebit_jax.__version__, "jax": jax.__version__}


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` returns.

    Attributes:
      step: updates made; 0 if there was no checkpoint.
      params: the parameters.
      opt_state: the optimizer state.
      others: a dict of the other trees that were given.
      extra: what was saved as ``extra``; None if there was no checkpoint.
    """

    step: int
    params: Any
    opt_state: Any
    others: dict[str, Any]
    extra: Any


class Checkpoints:
    """The checkpoints of a run in a folder; a context manager. All processes make all calls.

    A checkpoint is complete or absent: it is written beside the others, in the background, and
    renamed once it is complete. Outside a ``with`` block :meth:`save` waits until then. If an
    exception leaves the block in one of several processes, that process does not wait for a save
    under way, which may be lost: the others may never come to finish it.

    Args:
      folder: the folder of the checkpoints, and of nothing else; all processes must reach it.
      keep_last: how many of the latest checkpoints are kept.

    Raises:
      ValueError: for ``keep_last`` below 1.

    Example:
      A loop that goes on where it was stopped:

      >>> import tempfile
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> from onebit_jax.checkpoint import Checkpoints
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = onebit_jax.onebit_adam(1e-2, warmup=5, axis_name="data")
      >>> step = onebit_jax.train_step(lambda p, x: jnp.mean((x - p) ** 2), tx, mesh)
      >>> def train(folder, steps):
      ...     params = jax.device_put(jnp.zeros(3), jax.NamedSharding(mesh, jax.P()))
      ...     opt_state = onebit_jax.init(tx, params, mesh)
      ...     with Checkpoints(folder) as checkpoints:
      ...         begin, params, opt_state, *_ = checkpoints.restore(params, opt_state)
      ...         for i in range(begin, steps):
      ...             params, opt_state, _ = step(params, opt_state, jnp.ones((16, 3)))
      ...         checkpoints.save(steps, params, opt_state)
      ...     return begin, params
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     train(folder, 10)[0], train(folder, 20)[0]
      (0, 10)
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_last: int = 2):
        if keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: keep at least 1, the latest, to go on from.")
        self.folder, self._keep_last = pathlib.Path(folder).resolve(), keep_last
        self._manager: ocp.CheckpointManager | None = None
        self._in_block, self._damaged = False, list[int]()

    def __enter__(self) -> "Checkpoints":
        self._in_block = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._in_block = False
        if error is None or jax.process_count() == 1:
            self.close()

    def close(self) -> None:
        """Waits until everything is saved; raises ``OSError`` if that failed."""
        manager, self._manager = self._manager, None
        if manager:
            self._write(manager.close)

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, damaged ones included, in order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else ()
        return sorted(int(name) for name in names if name.isdecimal())

    def save(
        self, step: int, params: Any, opt_state: Any, *, extra: Any = None, **others: Any
    ) -> None:
        """Saves a run. Within ``with`` it returns once the arrays are copied.

        Args:
          step: updates made, more than at any checkpoint that is there.
          params: the parameters. Where workers train their own between two exchanges, as with
            ``local_steps`` and ``zero_one_adam``, the state's ``synced_parameters`` are saved.
          opt_state: the optimizer state in the mesh view, as a step returns it.
          extra: any JSON value, such as the position in the data; tuples come back as lists. Each
            process has its own.
          others: other trees of arrays and numbers, such as random keys or a model's state.

        Raises:
          ValueError: a checkpoint of this step or a later one is there, or two arrays would have
            one name.
          OSError: the folder cannot be written, or the previous save failed.
        """
        tree = {"params": _shared(params, opt_state), "opt_state": opt_state, **others}
        # Copied, since the loop goes on to change what it holds.
        extra = json.loads(json.dumps(extra))
        run = {"description": _described(tree), "versions": _VERSIONS, "extra": extra}
        args = ocp.args.Composite(state=ocp.args.StandardSave(tree), run=ocp.args.JsonSave(run))
        manager = self._manager = self._manager or self._write(self._open)
        if not self._write(lambda: manager.save(step, args=args)):
            raise ValueError(
                f"step={step}, but {self.folder} has checkpoint {manager.latest_step()}: call "
                f"restore first, or give another folder."
            )
        if not self._in_block:
            self.close()

    def restore(self, params: Any, opt_state: Any, *, tx: Any = None, **others: Any) -> Restored:
        """Restores the latest checkpoint; returns the arguments if there is none.

        A damaged checkpoint is named in a warning, and all processes restore the one before it. The
        next save renames the damaged one to ``STEP.damaged``.

        Args:
          params: parameters of the run's shapes and shardings.
          opt_state: an optimizer state of the run's shapes and shardings, from
            :func:`onebit_jax.init`.
          tx: the optimizer, for a state that was saved by another number of workers, which
            :func:`onebit_jax.resize` then converts.
          others: the other trees that were saved, of their shapes and shardings.

        Raises:
          ValueError: the checkpoint is of another format, another model, another optimizer or
            another number of workers; or all checkpoints are damaged. The message says what to do.
        """
        self.close()
        tree, steps = {"params": params, "opt_state": opt_state, **others}, self.steps()
        for step in reversed(steps):
            path = self.folder / str(step)
            run, problem = _read(path)
            if problem:
                warnings.warn(f"{path} is damaged; the one before is used: {problem}", stacklevel=2)
                continue
            convert = _check(run, _described(tree), tx, path)
            like = tree | _state_before(tx, tree, run["description"]) if convert else tree
            with ocp.StandardCheckpointer() as reader:
                loaded = reader.restore(path / "state", like)
            params, state = loaded.pop("params"), loaded.pop("opt_state")
            if convert:
                state = _resize(state, opt_state, tx, params, run["description"])
            self._damaged = [later for later in steps if later > step]
            return Restored(step, params, state, loaded, run["extra"])
        if steps:
            raise ValueError(f"no checkpoint in {self.folder} can be read, of steps {steps}")
        return Restored(0, params, opt_state, others, None)

    def _open(self) -> ocp.CheckpointManager:
        """Begins to write: damaged checkpoints are put aside, incomplete ones deleted."""
        for step in self._damaged if jax.process_index() == 0 else ():
            aside = self.folder / f"{step}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        self._damaged = []
        each = ocp.options.MultiprocessingOptions(primary_host=None)
        own_file = f"process-{jax.process_index():06}.json"
        run = ocp.JsonCheckpointHandler(own_file, multiprocessing_options=each)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self._keep_last),
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        handlers = ocp.handlers.create_default_handler_registry(run=run)
        return ocp.CheckpointManager(self.folder, options=options, handler_registry=handlers)

    def _write_checksums(self) -> None:
        """Called in process 0 once all files are written, before Orbax renames their folder."""
        [path] = self.folder.glob("*.orbax-checkpoint-tmp*")
        sums = {str(x.relative_to(path)): _checksum(x) for x in path.glob("*/**/*") if x.is_file()}
        (path / "checksums.json").write_text(json.dumps(sums))

    def _write(self, call: Any) -> Any:
        """Makes one line of the many errors of Orbax and its libraries."""
        try:
            return call()
        except Exception as error:
            self._manager = None
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            raise OSError(f"cannot write a checkpoint into {self.folder}: {problem}") from error


def _checksum(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _read(path: pathlib.Path) -> tuple[Any, str]:
    """What a run says of itself in a checkpoint, and what is wrong with the files, on any process.

    Each process compares a share of them with their checksums.
    """
    me, run, problem = jax.process_index(), None, ""
    try:
        if (path / "manifest").exists():
            return {"description": {_FORMAT: "11 or earlier"}, "versions": "earlier ones"}, ""
        sums = json.loads((path / "checksums.json").read_text())
        for name in sorted(sums)[me :: jax.process_count()]:
            if _checksum(path / name) != sums[name]:
                problem = f"{name} is not what was written"
        files = sorted((path / "run").glob("process-*.json"))
        run = json.loads(files[me % len(files)].read_text())
    # A damaged file may hold anything.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(bool(problem))))
    return run, problem or (f"process {failed[0]} cannot read it" if len(failed) else "")


def _parts(x: Any) -> list[tuple[str, ...]]:
    """For each axis of an array the mesh's axes that it lies along, as far as its sharding says."""
    spec = getattr(getattr(x, "sharding", None), "spec", ())
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def _workers(opt_state: Any) -> tuple[Any, Any]:
    """The mesh of a state in ``PerWorker`` nodes, and the axes that workers lie along.

    None and () where the state does not show them.
    """
    nodes = filter(is_per_worker, jax.tree.leaves(opt_state, is_leaf=is_per_worker))
    leaves = jax.tree.leaves(list(nodes))
    placed = [x for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)]
    # A compiled step leaves axes of size 1 out of shardings.
    found = [(x.sharding.mesh, next(iter(_parts(x)), ())) for x in placed]
    return max(found, key=lambda x: len(x[1]), default=(None, ()))


def _shared(params: Any, opt_state: Any) -> Any:
    """The parameters that all workers share, if each of them may train its own.

    Devices then hold other values of an array that is declared the same on all. Copies, which
    :func:`onebit_jax.worker_copies` made, have a row for every worker, and stay.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "synced_parameters"))
    states = [node for node in nodes if hasattr(node, "synced_parameters")]
    (_, slow), synced = _workers(opt_state), params
    if not states or not slow or all(_parts(x)[:1] == [slow] for x in jax.tree.leaves(params)):
        return params
    for state in states:
        synced = state.synced_parameters(synced)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), synced, params)


def _classes(structure: Any) -> list[str]:
    """The classes of all nodes of a tree, outer ones first."""
    data = structure.node_data()
    inner = [name for child in structure.children() for name in _classes(child)]
    return [data[0].__name__, *inner] if data else inner


def _described(tree: dict[str, Any]) -> dict[str, Any]:
    """What a run is, to compare with one that is to go on.

    Of each parameter also the axes that split the model: each device's part of the state belongs to
    its part of the parameters.
    """
    mesh, slow = _workers(tree["opt_state"])
    sizes = mesh.shape if mesh else {}
    classes = dict.fromkeys(_classes(jax.tree.structure(tree["opt_state"])))
    found = {_FORMAT: FORMAT, _AXES: [[*x] for x in sizes.items()], "opt_state": list(classes)}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise ValueError(f"two arrays would be saved as {name}: leave dots out of their names")
        parts = enumerate(_parts(x) if path[0].key == "params" else ())
        fast = [(i, n) for i, part in parts for n in part if sizes.get(n, 1) > 1 and n not in slow]
        split = [f"axis {i} along {n}" for i, n in fast]
        found[name] = [str(getattr(x, "dtype", type(x).__name__)), list(np.shape(x)), *split]
    return found


def _check(run: Any, now: Any, tx: Any, path: pathlib.Path) -> bool:
    """Whether a checkpoint is of other workers, and their state is to be converted.

    Raises:
      ValueError: it does not fit. The message says what to do.
    """
    saved = run["description"]
    convert = tx is not None and bool(now[_AXES]) and saved.get(_AXES) not in ([], now[_AXES])
    for name in [*saved, *now]:
        was, has = saved.get(name, "absent"), now.get(name, "absent")
        # What is converted is checked then.
        if was != has and not (convert and (name == _AXES or name.startswith("opt_state"))):
            raise ValueError(
                f"{path} is of another run: {name} is {was} there and {has} here. Go on with its "
                f"model, optimizer and versions {run.get('versions')}; if the number of workers is "
                f"another, give restore tx=; or take the parameters alone, "
                f"orbax.checkpoint.StandardCheckpointer().restore('{path}/state')['params']."
            )
    return convert


def _state_before(tx: Any, tree: Any, saved: Any) -> Any:
    """The shapes of the state that other workers saved, whole on a CPU of this process."""
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    state, init = tree["opt_state"], tx.init
    if saved.keys() != _described(tree).keys():
        for name, size in saved[_AXES]:
            init = _along(name, size, init)
        shards = jax.tree.map(lambda x: x.addressable_shards[0].data, tree["params"])
        state = jax.eval_shape(init, shards)

    def as_saved(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        _, shape, *_ = saved.get(name, ("", x.shape))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=host)

    return jax.tree_util.tree_map_with_path(as_saved, {"opt_state": state})


def _along(name: str, size: int, init: Any) -> Any:
    return lambda params: jax.vmap(lambda _: init(params), axis_name=name)(np.zeros(size))


def _resize(state: Any, like: Any, tx: Any, params: Any, saved: Any) -> Any:
    mesh, slow = _workers(like)
    split: dict[str, Any] = {}
    if slow and slow != mesh.axis_names:
        specs = jax.tree.map(lambda x: x.sharding.spec, params)
        split = {"axis_name": slow if len(slow) > 1 else slow[0], "param_specs": specs}
    return onebit_jax.resize(state, tx, params, mesh, from_axes=dict(saved[_AXES]), **split)
