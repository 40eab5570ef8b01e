"""Checkpoints in a folder."""

import contextlib
import math
import os
import pathlib
import shutil
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from onebit_jax import validation
from onebit_jax.checkpoint import hyperparameters, loading, manifest, workers
from onebit_jax.checkpoint.checksums import checksums
from onebit_jax.checkpoint.manifest import DamagedError
from onebit_jax.checkpoint.moving import Move

# What Orbax calls a checkpoint by until it is complete.
_TEMPORARY = ".orbax-checkpoint-tmp"
# What a complete one holds, and an incomplete one or another program's has something of.
_CONTENTS = {"_CHECKPOINT_METADATA", "commit_success.txt", "manifest", "orbax.checkpoint", "state"}

# After an exception in one of several processes: another one may have failed to write its part,
# which Orbax's barrier takes five minutes to find out.
_PATIENCE_SECONDS = 30.0

# Those whose last save may still be under way.
_saving: set["Checkpoints"] = set()


def _finish_all() -> None:
    for checkpoints in tuple(_saving):
        checkpoints._finish()


# Orbax saves in threads that start others, which Python allows until the main thread ends: from
# then on, and so in what `atexit` calls, a save never ends. From Python 3.12 on it does not allow
# them in what is called here either, so that a save that nobody will wait for must not be left.
cast(Any, threading)._register_atexit(_finish_all)
_ENDS_WITH_PYTHON = sys.version_info < (3, 12)


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` returns.

    Attributes:
      step: updates made; 0 if there was no checkpoint.
      params: the parameters.
      opt_state: the optimizer state.
      others: what else was given.
      extra: what was saved as ``extra``; None if there was no checkpoint.
    """

    step: int
    params: Any
    opt_state: Any
    others: Any
    extra: Any


class Checkpoints:
    """The checkpoints of a run in a folder; a context manager. All processes make all calls.

    A checkpoint is whole or not there: it is written beside the others, in the background, and
    moved to its place once it is complete. It holds every worker's residuals, a manifest that is
    checked before anything is restored, and a checksum of every worker's part of every array, which
    is checked afterwards. Nothing in it is executed, and its contents name no file.

    Only whole checkpoints are ever deleted. Other files and folders stay as they are, and so do
    links. A save that is under way when Python ends is finished first; with Python 3.12 and later
    :meth:`save` therefore waits for itself outside a ``with`` block. Where there are several
    processes, an exception in the block waits for it for 30 s at most: another process may have
    failed to write its part.

    Args:
      folder: the folder of the checkpoints; all processes must reach it.
      keep_last: how many of the latest checkpoints are kept.
      keep_best: how many more are kept, those with the smallest ``metric``.

    Raises:
      ValueError: for a number below 1, or ``keep_best`` below 0; for a folder whose name is no text
        in the locale's encoding.

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

    def __init__(self, folder: str | os.PathLike[str], *, keep_last: int = 2, keep_best: int = 0):
        validation.check_step_count("keep_last", keep_last, 1, "The latest is needed to go on.")
        validation.check_step_count("keep_best", keep_best, 0, "0 for none.")
        self.folder = pathlib.Path(folder).resolve()
        try:
            str(self.folder).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"folder={str(self.folder)!a} is not text in the encoding of this locale, and what "
                f"writes checkpoints takes UTF-8 alone: set PYTHONUTF8=1 or a locale of UTF-8, or "
                f"give a folder with an ASCII name."
            ) from None
        self._keep_last, self._keep_best = keep_last, keep_best
        self._saving: ocp.AsyncResponse[Any] | None = None
        self._damaged: list[int] = []
        self._begun = False
        self._waited_for = _ENDS_WITH_PYTHON

    def __enter__(self) -> "Checkpoints":
        self._waited_for = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._waited_for = _ENDS_WITH_PYTHON
        if error is None:
            self.close()
            return
        # Other processes may not have failed: to meet them would be to wait for ever.
        try:
            self._finish(None if jax.process_count() == 1 else _PATIENCE_SECONDS)
        except OSError as failed:
            error.add_note(str(failed))

    def close(self) -> None:
        """Waits until everything is saved; raises ``OSError`` if that failed."""
        self._wait()

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, damaged ones included, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(path.name)
            for path in self.folder.iterdir()
            if path.name.isdecimal()
            and str(int(path.name)) == path.name
            and path.is_dir()
            and {x.name for x in path.iterdir()} & _CONTENTS
        )

    def save(
        self,
        step: int,
        params: Any,
        opt_state: Any,
        others: Any = None,
        *,
        extra: Any = None,
        metric: float | None = None,
        tx: optax.GradientTransformation | None = None,
    ) -> None:
        """Saves a run; returns once everything is copied, while it is still being written.

        With Python 3.12 and later that is so in a ``with`` block alone.

        Args:
          step: updates made, more than at any checkpoint that is there.
          params: the parameters. Where workers train their own between two exchanges, as of
            ``local_steps`` and ``zero_one_adam``, those that all share are saved:
            ``synced_parameters``.
          opt_state: the optimizer state in the mesh view, as a step returns it.
          others: any other tree of arrays and numbers, such as random keys or a model's state.
          extra: what JSON can hold, such as the place in the data; tuples come back as lists. Each
            process has its own.
          metric: of ``keep_best``, the smaller the better; the same on all processes. NaN is never
            among the best.
          tx: the optimizer, whose hyperparameters ``restore`` then compares with its own ``tx``;
            the one that :func:`onebit_jax.on_mesh` was given, not wrapped.

        Raises:
          ValueError: for a step that is not after all checkpoints that are there, or whose name
            another folder or file has; for an ``extra`` that JSON cannot hold as it is, with keys
            that are no strings among it; for ``others`` that are no arrays or real numbers, two
            of them under one name, and a ``metric`` that is no number; for arrays on the devices of
            one process, if there are several.
          OSError: the folder is gone or cannot be written, or the save before this one failed.
        """
        validation.check_step_count("step", step, 1, "Give the number of updates made.")
        if tx is not None:
            validation.check_transformation("tx", tx)
        if metric is not None and not validation.is_real(metric):
            raise ValueError(f"metric={metric!r} must be a real number, or None.")
        step, metric = int(step), None if metric is None else float(metric)
        tree = {"params": params, "opt_state": opt_state, "others": others}
        manifest.check_leaves(tree)
        manifest.check_places(tree)
        self._wait()
        self._tidy_up()
        steps, path = self.steps(), self.folder / str(step)
        if steps and step <= steps[-1]:
            raise ValueError(
                f"there is a checkpoint of step {steps[-1]} in {self.folder} already, so that one "
                f"of step {step} would not be the latest: call restore first, which goes on from "
                f"the latest, or give another folder."
            )
        if os.path.lexists(path):
            raise ValueError(
                f"{path} is in the way, and is no checkpoint of onebit_jax: move it, or give "
                f"another folder."
            )
        tree = workers.with_shared_parameters(tree)
        written = manifest.describe(step, tree) | {"metric": metric}
        if tx is not None:
            one, mesh = workers.one_worker(tree), workers.mesh_of(tree)
            written["hyperparameters"] = hyperparameters.of(tx, one, mesh)
        sums = {name: checksums(x) for name, x in manifest.leaves(tree)}
        try:
            own = manifest.encoded({"checksums": sums, "extra": extra})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"extra is not what JSON can hold: {error}") from error
        files = {loading.own_file(jax.process_index()): own}
        if jax.process_index() == 0:
            files[loading.MANIFEST] = manifest.encoded(written)
        saved = {"state": loading.filled(tree), "manifest": _Files(files)}
        with self._failing_as_os_error():
            self._saving = ocp.save_checkpointables_async(str(path), saved)
        _saving.add(self)
        if not self._waited_for:
            self._wait()

    def restore(
        self,
        params: Any,
        opt_state: Any,
        others: Any = None,
        *,
        tx: optax.GradientTransformation | None = None,
        saved_tx: optax.GradientTransformation | None = None,
    ) -> Restored:
        """Restores the latest checkpoint; returns the arguments if there is none.

        A damaged checkpoint is named in a warning, and the one before it is restored, on all
        processes alike. The next save renames the damaged one to ``STEP.damaged``.

        Args:
          params: parameters of the run's shapes and shardings.
          opt_state: an optimizer state of the run's shapes and shardings, from
            :func:`onebit_jax.init`.
          others: what else was saved, of its shapes and shardings.
          tx: the optimizer, for a state that was saved by another number of workers:
            :func:`onebit_jax.resize` converts it to this number. Of copies, which
            :func:`onebit_jax.worker_copies` made, it is the optimizer that
            :func:`onebit_jax.on_mesh` was given, and parameters and ``others`` are converted, too:
            floats are averaged over the workers. Hyperparameters that ``save`` was
            given by another ``tx`` are named in a warning, and those of this one are used.
          saved_tx: the optimizer that it was saved with, if options of its exchange differ.

        Raises:
          ValueError: the checkpoint is of another version, another model, another optimizer or
            another number of workers; or all checkpoints are damaged. The message says what to do.
        """
        tree = {"params": params, "opt_state": opt_state, "others": others}
        manifest.check_leaves(tree)
        self._wait()
        steps = self.steps()
        for step in reversed(steps):
            path = self.folder / str(step)
            where = f"the checkpoint {path}"
            try:
                written, extra, sums = loading.on_all_processes(loading.read, path)
                manifest.check_splits(written, tree, where)
                like, move, axes = tree, None, written["axes"]
                differ = workers.differ(axes, workers.axes(tree))
                if tx is not None and (saved_tx is not None or differ):
                    move = Move(tree, axes, tx, saved_tx or tx)
                    like = move.saved()
                manifest.check(written, like, where)
                loaded = loading.on_all_processes(loading.load, path, like, sums)
            except DamagedError as problem:
                warnings.warn(
                    f"{where} is damaged ({problem}); the one before it is used", stacklevel=2
                )
                continue
            if move is not None:
                loaded = move.moved(loaded)
            if tx is not None:
                now = hyperparameters.of(tx, workers.one_worker(tree), workers.mesh_of(tree))
                hyperparameters.warn_of_others(written.get("hyperparameters"), now, where)
            self._damaged = [later for later in steps if later > step]
            return Restored(step, **loaded, extra=extra)
        if steps:
            raise ValueError(
                f"no checkpoint in {self.folder} can be read, of steps "
                f"{', '.join(map(str, steps))}: they are damaged, or of an earlier version of "
                f"onebit_jax. Put back a copy, or begin in another folder."
            )
        return Restored(0, **tree, extra=None)

    def _wait(self) -> None:
        """Waits for the save that is under way, then deletes superfluous checkpoints."""
        if not self._finish():
            return
        _by_first_process(self._delete_superfluous)

    def _finish(self, timeout: float | None = None) -> bool:
        """Waits so many seconds for the save that is under way; whether there was one."""
        saving, self._saving = self._saving, None
        _saving.discard(self)
        if saving is None:
            return False
        with self._failing_as_os_error():
            try:
                saving.result(timeout)
            except TimeoutError as error:
                raise TimeoutError(str(error) or f"not complete after {timeout} s") from error
        return True

    @contextlib.contextmanager
    def _failing_as_os_error(self) -> Iterator[None]:
        """Turns the many errors of Orbax and its libraries into one line."""
        try:
            yield
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            raise OSError(
                f"a checkpoint could not be written into {self.folder} ({problem}); those before "
                f"it are as they were"
            ) from error

    def _delete_superfluous(self) -> None:
        for path in self._superfluous():
            # What a kill leaves of it is then deleted by the next save.
            gone = path.rename(f"{path}{_TEMPORARY}-superfluous")
            shutil.rmtree(gone)

    def _superfluous(self) -> list[pathlib.Path]:
        """Whole checkpoints, links excluded, that are neither among the latest nor the best."""
        metrics = {}
        for step in self.steps():
            path = self.folder / str(step)
            with contextlib.suppress(DamagedError, ValueError):
                metric = loading.read_manifest(path)["metric"]
                metrics[step] = math.nan if metric is None else metric
        ranked = sorted((metric, step) for step, metric in metrics.items() if metric == metric)
        kept = {*list(metrics)[-self._keep_last :], *(x[1] for x in ranked[: self._keep_best])}
        paths = [self.folder / str(step) for step in metrics.keys() - kept]
        return [path for path in paths if not path.is_symlink()]

    def _tidy_up(self) -> None:
        """Renames damaged checkpoints, and deletes incomplete ones of earlier starts."""
        if self._begun and not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is gone; put it back, or begin in another one")
        self._begun = True

        def tidy() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"[0-9]*{_TEMPORARY}*"):
                shutil.rmtree(path)
            for step in self._damaged:
                aside = self.folder / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)

        _by_first_process(tidy)
        self._damaged = []


def _by_first_process(work: Callable[[], None]) -> None:
    """Lets process 0 work, and all wait for it; raises ``OSError`` on all if it did there."""
    problem = None
    if jax.process_index() == 0:
        try:
            work()
        except OSError as error:
            problem = error
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.array(problem is not None))
        if problem is None and np.any(failed):
            problem = OSError(
                "process 0 could not tidy the folder of checkpoints up: see its error"
            )
    if problem is not None:
        raise problem


class _Files:
    """JSON files in a checkpoint, in the form in which Orbax takes what is no array."""

    def __init__(self, files: Mapping[str, str]):
        self._files = files

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            folder = pathlib.Path(await directory.await_creation())
            for name, text in self._files.items():
                (folder / name).write_text(text, encoding="utf-8")

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        raise NotImplementedError("they are read before the arrays are")
