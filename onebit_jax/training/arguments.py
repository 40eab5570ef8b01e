"""What a training step is built from, and the arguments of a call: checks and placement."""

from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves
from onebit_jax.programs.over_workers import mesh_of_arrays
from onebit_jax.programs.replica_check import check_replicas
from onebit_jax.states import placement
from onebit_jax.states.sharded_model import ShardedModel
from onebit_jax.training.gradients import LossFn
from onebit_jax.training.model_state import check_random_keys
from onebit_jax.transforms.nonfinite import Skips, no_skips


class Options(NamedTuple):
    """The options of a step, which :func:`onebit_jax.train_step` documents."""

    accumulation: int
    max_grad_norm: float | None
    clip: Literal["common", "local"]
    grad_norm_every: int | None
    max_skipped: int | None


class Setup(NamedTuple):
    """What a step is built from; ``sharded`` is None if every device is a worker."""

    loss_fn: LossFn
    tx: optax.GradientTransformationExtraArgs
    mesh: Mesh | AbstractMesh
    sharded: ShardedModel | None
    options: Options

    @property
    def devices(self) -> Mesh:
        """The mesh of the arrays' devices."""
        return mesh_of_arrays(self.mesh)

    @property
    def on_cpus(self) -> bool:
        """Whether workers compute on CPUs."""
        return self.devices.devices.flat[0].platform == "cpu"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that workers lie along."""
        return self.mesh.axis_names if self.sharded is None else self.sharded.axes.slow_names

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.mesh.size if self.sharded is None else self.sharded.axes.workers


class Arguments(NamedTuple):
    """The arguments of a step's program; the first three are donated.

    Attributes:
      params: the parameters.
      opt_state: the optimizer's state.
      model_state: the model's state, or None.
      batch: the batch.
      rng: a random key, or None.
      loss_scale: a factor of the loss, or None.
      extra_args: further arguments of the optimizer's update, by name.
      measured: whether the gradients' norm is measured; bool ``[]``.
      skips: the account of skipped steps.
    """

    params: Any
    opt_state: Any
    model_state: Any
    batch: Any
    rng: Any
    loss_scale: Any
    extra_args: Any
    measured: Any = np.bool(True)
    skips: Skips = no_skips()

    def by_donation(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The donated arguments, and the others."""
        return self[:3], self[3:]

    def donated(self) -> dict[str, Any]:
        """The donated arguments by name."""
        return dict(zip(self._fields[:3], self[:3], strict=True))


def check_batch(setup: Setup, batch: Any) -> None:
    """Raises ``ValueError`` unless a batch divides into workers and microbatches."""
    parts = setup.workers * setup.options.accumulation
    for name, leaf in named_leaves(batch, "batch"):
        shape = np.shape(leaf)
        if not shape or shape[0] % parts or not shape[0]:
            raise ValueError(
                f"{name} has shape {shape}, but its first axis "
                f"must be a multiple of {parts} = {setup.workers} workers x accumulation "
                f"{setup.options.accumulation}. Change the batch size or the accumulation."
            )


class Placements:
    """Places the arguments of a step on its mesh, and checks those that no step has placed."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._shardings: dict[Any, Arguments] = {}

    def structure(self, given: Arguments) -> Any:
        """What the arguments' placement, and the program that takes them, depend on."""
        structure = jax.tree.structure(given)
        if self._setup.sharded is None:
            return structure
        specs = self._setup.sharded.batch_specs(given.batch)
        return structure, tuple(jax.tree.leaves(specs))

    def shardings(self, given: Arguments) -> Arguments:
        """The shardings of the arguments, in a tree like theirs."""
        key = self.structure(given)
        if key not in self._shardings:
            # The specs of a sharded model are known once its parameters are checked.
            _check(self._setup, given)
            devices, specs = self._setup.devices, _specs(self._setup, given)
            self._shardings[key] = jax.tree.map(lambda x: NamedSharding(devices, x), specs)
        return self._shardings[key]

    def place(self, given: Arguments) -> Arguments:
        """Places the arguments, and checks any state that an earlier step did not place."""
        known = len(self._shardings)
        shardings = self.shardings(given)
        state, places = jax.tree.leaves(given[:2]), jax.tree.leaves(shardings[:2])
        if len(self._shardings) == known and not all(map(placement.is_placed, state, places)):
            _check(self._setup, given)
        # Mapped, since there may be no key.
        rng = jax.tree.map(placement.place_random_key, given.rng, shardings.rng)
        # With several processes `place` compares what is on the host, which takes an exchange.
        apart = {"rng": None, "measured": None}
        arrays = given._replace(**apart), shardings._replace(**apart), given._fields
        placed = Arguments(*map(placement.place, *arrays))
        return placed._replace(rng=rng, measured=given.measured)


def _specs(setup: Setup, given: Arguments) -> Arguments:
    """The partition specs of the arguments."""
    if setup.sharded is None:
        axes = setup.mesh.axis_names
        split = {
            "opt_state": placement.state_specs(given.opt_state, axes),
            "batch": jax.tree.map(lambda _: P(axes), given.batch),
        }
    else:
        split = {
            "params": setup.sharded.specs(given.params),
            "opt_state": setup.sharded.state_specs(given.params),
            "batch": setup.sharded.batch_specs(given.batch),
        }
    return jax.tree.map(lambda _: P(), given)._replace(**split)


def _check(setup: Setup, given: Arguments) -> None:
    """Checks arguments for users' errors, by shapes and types alone."""
    tx, mesh, params, opt_state = setup.tx, setup.mesh, given.params, given.opt_state
    placement.check_donated(given.donated(), placement.buffer)
    check_random_keys(given.rng, given.batch)
    if setup.sharded is not None:
        setup.sharded.check_state(params, opt_state)
        return
    placement.check_whole(params)
    shapes = placement.state_shapes(tx, params, mesh)
    placement.check_simulated(shapes, mesh)
    placement.check_plans(tx, params, opt_state, mesh)
    placement.check_state(opt_state, shapes, mesh)
    specs = placement.state_specs(shapes, mesh.axis_names)
    check_replicas(tx, params, shapes, specs, mesh, given.extra_args)
