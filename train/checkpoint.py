"""Checkpoints of a training run: parameters, optimizer state, progress and place in the data."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

_KEPT = 2


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: updates made.
        bytes_sent: what each worker has sent in them.
        seconds: wall time spent in them.
        frozen_at: updates made when 1-bit Adam's variance froze, -1 before and for Adam.
    """

    step: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    frozen_at: int = -1


class Checkpoints:
    """The checkpoints in a folder; a context manager. All processes of a run make all calls.

    Args:
        folder: where they are, or will be.
    """

    def __init__(self, folder: pathlib.Path):
        self._checkpointer = ocp.training.Checkpointer(
            str(folder.resolve()),
            preservation_policy=ocp.training.preservation_policies.LatestN(_KEPT),  # pyright: ignore[reportArgumentType]: its own
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(
        self,
        progress: Progress,
        params: Any,
        opt_state: Any,
        batches: Iterator[dict[str, np.ndarray]],
    ) -> None:
        """Saves a run after `progress.step` updates; `batches` is a Grain iterator."""
        state = {
            "params": params,
            "opt_state": opt_state,
            "progress": dataclasses.asdict(progress),
            "batches": batches,
        }
        # Without force, a save that falls due while another is running would be left out.
        self._checkpointer.save_checkpointables(progress.step, state, force=True)

    def restore(
        self, params: Any, opt_state: Any, batches: Iterator[dict[str, np.ndarray]]
    ) -> tuple[Progress, Any, Any]:
        """Goes back to the latest checkpoint; without one, returns the arguments.

        Args:
            params: parameters of the run's shapes and shardings.
            opt_state: an optimizer state of the run's shapes and shardings.
            batches: the run's Grain iterator, which is set to the checkpoint's place.

        Returns:
            Progress, parameters and optimizer state.

        Raises:
            ValueError: the checkpoint is of other parameters or of another optimizer.
        """
        latest = self._checkpointer.latest
        if latest is None:
            return Progress(), params, opt_state
        saved = self._checkpointer.checkpointables_metadata(latest).metadata
        for name, tree in {"params": params, "opt_state": opt_state}.items():
            self._check_same_tree(name, _shapes(saved[name]), _shapes(tree))
        wanted = {
            "params": abstract(params),
            "opt_state": abstract(opt_state),
            "progress": None,
            "batches": batches,
        }
        restored = self._checkpointer.load_checkpointables(latest, wanted)
        return Progress(**restored["progress"]), restored["params"], restored["opt_state"]

    def _check_same_tree(
        self, name: str, saved: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
    ) -> None:
        differing = [
            leaf for leaf in saved.keys() | expected.keys() if saved.get(leaf) != expected.get(leaf)
        ]
        if differing:
            leaf = min(differing)
            raise ValueError(
                f"the checkpoint in {self._checkpointer.directory} is of another tree: {name} "
                f"{leaf} has shape {saved.get(leaf, 'absent')} there and "
                f"{expected.get(leaf, 'absent')} in this run; give another --out, or the options "
                "that it was made with"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def abstract(tree: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
