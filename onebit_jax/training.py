"""From a loss and an optimizer to a training step on a mesh."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax import phase_choice, step_metrics, validation
from onebit_jax.collective_check import check_collectives
from onebit_jax.gradients import LossFn, loss_and_gradients
from onebit_jax.per_worker import is_per_worker
from onebit_jax.step_metrics import Metrics
from onebit_jax.transforms import phases

Phase = phases.Phase


def state_specs(opt_state: optax.OptState, axis_name: str | tuple[str, ...]) -> Any:
    """Says how an optimizer state lies on a mesh, read from the state itself.

    Args:
      opt_state: any Optax state, or its shapes.
      axis_name: the axis or axes that the workers run along.

    Returns:
      A tree like ``opt_state`` of partition specs: ``P(axis_name)`` for leaves inside a
      :class:`~onebit_jax.PerWorker`, whose first axis is the worker, and ``P()`` for the others.

    >>> import jax.numpy as jnp
    >>> from onebit_jax import PerWorker, state_specs
    >>> state_specs({"count": jnp.zeros(()), "residual": PerWorker(jnp.zeros((4, 3)))}, "data")
    {'count': P(), 'residual': PerWorker(value=P('data',))}
    """

    def specs(node: Any) -> Any:
        return jax.tree.map(lambda _: P(axis_name) if is_per_worker(node) else P(), node)

    return jax.tree.map(specs, opt_state, is_leaf=is_per_worker)


def init(tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh) -> optax.OptState:
    """Initialises an optimizer on a mesh; every device of the mesh is a worker.

    Args:
      tx: the optimizer; its ``axis_name`` must be the axis of the mesh, or the pair of its axes.
      params: the parameters, equal on all processes.
      mesh: a mesh over the devices of one process or of many, with one axis, or with two for the
        hierarchical exchange: ``jax.make_mesh((nodes, devices_per_node), ("node", "local"))``.

    Returns:
      The state in the mesh view: global arrays on this very mesh, what workers share replicated,
      what each has for itself (:class:`~onebit_jax.PerWorker`) with a leading axis that is sharded
      over the mesh.

    Raises:
      ValueError: from the optimizer, for an axis that the mesh has not, for one of the mesh that it
        would not average over, and for parameters that it cannot train.
    """

    def on_mesh(out_specs: Any) -> Callable[[optax.Params], optax.OptState]:
        return jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)

    replicated = NamedSharding(mesh, P())
    # The mesh is set, lest shard_map refuse it where the user has set one that differs in its types
    # of axes.
    with use_abstract_mesh(mesh.abstract_mesh):
        params = _placed(params, jax.tree.map(lambda _: replicated, params))
        specs = state_specs(jax.eval_shape(on_mesh(P()), params), mesh.axis_names)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        # Of a state without arrays nothing but the parameters would tell jit its devices.
        program = jax.jit(
            on_mesh(specs), in_shardings=replicated, out_shardings=shardings, keep_unused=True
        )
        return program(params)


def _placed(tree: Any, shardings: Any) -> Any:
    """Puts arrays where they belong, unless they are there.

    Placed otherwise than a program's results will be, they would cost a second compilation, and
    with explicit axes be refused.
    """

    def placed(x: Any, sharding: NamedSharding) -> Any:
        return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)

    return jax.tree.map(placed, tree, shardings)


class TrainStep:
    """A compiled training step; :func:`train_step` makes it and says what it does."""

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        accumulation: int,
        max_grad_norm: float | None,
        clip: Literal["common", "local"],
        grad_norm_every: int | None,
    ):
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._mesh = mesh
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._clip = clip
        # Where gradients are clipped by it, their norm is known in every step.
        self._grad_norm_every = grad_norm_every if max_grad_norm is None else 1
        self._calls = 0
        self._phases = phase_choice.PhaseChoice()
        self._placements: dict[Any, Any] = {}
        self._programs: dict[Any, Any] = {}

    def __call__(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        phase: Phase | None = None,
    ) -> tuple[optax.Params, optax.OptState, Metrics]:
        """Makes one update; ``params`` and ``opt_state`` are donated."""
        self._check_batch(batch)
        given = params, opt_state, batch
        # Within a jitted loop of steps a state does not tell its phase.
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        if not traced:
            phase = self._phases.choose(opt_state, phase)
        every = self._grad_norm_every
        measured = every is not None and (traced or self._calls % every == 0)
        with use_abstract_mesh(self._mesh.abstract_mesh):
            args = (*_placed(given, self._placement(given)), np.bool(measured))
            params, opt_state, metrics, outlook = self._program(args, phase)(*args)
        if not traced:
            self._phases.observe(opt_state, outlook, phase)
            self._calls += 1
        if every is not None and not measured:
            del metrics["grad_norm"]
        return params, opt_state, metrics

    def lower(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        phase: Phase | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, or for their shapes, without running it.

        Without ``phase`` it is the program that has all phases and chooses on the devices, which is
        not what a call without ``phase`` runs.
        """
        self._check_batch(batch)
        with use_abstract_mesh(self._mesh.abstract_mesh):
            shapes = jax.eval_shape(lambda *args: args, params, opt_state, batch)
            placed = jax.tree.map(
                lambda x, sharding: x.update(sharding=sharding), shapes, self._placement(shapes)
            )
            args = (*placed, np.bool(True))
            return self._program(args, phase).lower(*args)

    def _placement(self, args: tuple[Any, Any, Any]) -> Any:
        """Where parameters, state and batch belong: shardings in a tree like theirs."""
        structure = jax.tree.structure(args)
        if structure not in self._placements:
            params, opt_state, batch = args
            axes = self._mesh.axis_names
            specs = (
                jax.tree.map(lambda _: P(), params),
                state_specs(opt_state, axes),
                jax.tree.map(lambda _: P(axes), batch),
            )
            self._placements[structure] = jax.tree.map(
                lambda spec: NamedSharding(self._mesh, spec), specs
            )
        return self._placements[structure]

    def _program(self, args: tuple[Any, Any, Any, Any], phase: Phase | None) -> Any:
        """The jitted step for arguments of this structure, which lie where they belong."""
        key = (jax.tree.structure(args), phase)
        if key not in self._programs:
            replicated = NamedSharding(self._mesh, P())
            inputs = (*self._placement(args[:3]), replicated)
            outputs = (*inputs[:2], replicated, replicated)

            def step(params: Any, opt_state: Any, batch: Any, measured: Any) -> Any:
                return self._worker(params, opt_state, batch, measured, phase)

            # check_vma would call a momentum varying that lies in a residual's place and yet is
            # equal on all workers. It would also sum the gradients of replicated parameters.
            mapped = jax.shard_map(
                step,
                mesh=self._mesh,
                in_specs=jax.tree.map(lambda sharding: sharding.spec, inputs),
                out_specs=jax.tree.map(lambda sharding: sharding.spec, outputs),
                check_vma=False,
            )
            program = jax.jit(
                mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=(0, 1)
            )
            check_collectives(program.trace(*args).jaxpr.jaxpr)
            self._programs[key] = program
        return self._programs[key]

    def _check_batch(self, batch: Any) -> None:
        parts = self._mesh.size * self._accumulation
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape = np.shape(leaf)
            if not shape or shape[0] % parts or not shape[0]:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {shape}, but its first axis "
                    f"must be a multiple of {parts} = {self._mesh.size} workers x accumulation "
                    f"{self._accumulation}. Change the batch size or the accumulation."
                )

    def _worker(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        measured: jax.Array,
        phase: Phase | None,
    ) -> tuple[optax.Params, optax.OptState, Metrics, jax.Array]:
        """The step as one worker makes it, in the worker view, and its outlook."""
        axes = self._mesh.axis_names
        loss, metrics, grads = loss_and_gradients(self._loss_fn, params, batch, self._accumulation)
        own = {"loss": loss}
        if self._grad_norm_every is not None:
            own["grad_norm"] = self._squared_norm(grads, measured)
        if self._max_grad_norm is not None:
            bound = own["grad_norm"]
            if self._clip == "common":
                bound = lax.pmean(bound, axes)
            factor = jnp.minimum(1.0, self._max_grad_norm * lax.rsqrt(bound))
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        params, opt_state, outlook = phase_choice.update(self._tx, grads, opt_state, params, phase)

        own |= step_metrics.of_optimizers(opt_state)
        if taken := own.keys() & metrics.keys():
            raise ValueError(
                f"loss_fn returned metrics named {sorted(taken)}, which the step has itself; "
                f"give them other names."
            )
        metrics = step_metrics.mean_over_workers(metrics | own, axes)
        if self._grad_norm_every is not None:
            metrics["grad_norm"] = jnp.sqrt(metrics["grad_norm"])
        return params, opt_state, metrics, outlook

    def _squared_norm(self, grads: optax.Updates, measured: jax.Array) -> jax.Array:
        def squared_norm(grads: optax.Updates) -> jax.Array:
            return optax.tree.norm(
                jax.tree.map(lambda g: g.astype(jnp.float32), grads), squared=True
            )

        if self._grad_norm_every == 1:
            return squared_norm(grads)
        return lax.cond(measured, squared_norm, lambda _: jnp.float32(0), grads)


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    clip: Literal["common", "local"] = "common",
    grad_norm_every: int | None = None,
) -> TrainStep:
    r"""Builds a training step in which every device of a mesh is a worker.

    Each worker computes the gradient of its own share of the batch, and the optimizer sees exactly
    that: nothing is averaged before it. The objective is the mean of the workers' losses.

    Args:
      loss_fn: ``loss_fn(params, batch)`` gives a scalar, the mean over the batch it is given, or
        that and a dict of scalar metrics.
      tx: the optimizer. It must average over the mesh itself, as this library's do; put
        :func:`onebit_jax.mean_gradients` before a dense one.
      mesh: as for :func:`init`; all its devices are workers, along whichever axis they lie.
      accumulation: number of microbatches that a worker's share is cut into; their gradients are
        averaged in float32.
      max_grad_norm: clips gradients before the optimizer sees them; None for no clipping.
      clip: ``"common"`` multiplies all workers' gradients by one factor, so that the root of their
        mean squared norm is at most ``max_grad_norm`` (one float32 more in the exchange);
        ``"local"`` clips each worker's gradient by its own norm, which bends the mean towards
        workers with small gradients.
      grad_norm_every: in which calls the norm of the gradients is measured, which is a pass over
        all of them: the first, and every that many after it. None for none. Where gradients are
        clipped it is known in all of them.

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. ``opt_state`` comes from
      :func:`onebit_jax.init`. ``batch`` is a tree of global arrays whose first axis is split over
      the workers. ``params`` and ``opt_state`` are donated. ``metrics`` are scalars on all workers:

      - ``loss``, and whatever else ``loss_fn`` returned: means over the workers;
      - ``grad_norm``, in calls in which it is measured: root of the workers' mean squared gradient
        norm, before clipping;
      - ``phase`` of the update, by its place in "warmup", "compression", "local", "sync"; -1 if it
        was refused, 0 for an optimizer that has no phases;
      - what else the optimizer's state reports, such as ``residual_ratio``. Where several in one
        ``optax.partition`` report the same, their labels stand in front: ``matrices/phase``.

      Each phase of an optimizer is compiled for itself, at the first call that needs it. A call
      finds out by itself which one is next, from an account that the last update but one left, and
      so waits for that one: no more than two updates are ever under way. At a change of phase, and
      where :func:`onebit_jax.variance_stable` may end the warm-up at any update, it waits for the
      last one. Optimizers that are in different phases share a program that has them all.

      ``step(..., phase="compression")`` is for a host that knows the phase. One that is not the
      optimizer's own changes neither parameters nor state, and the metric ``phase`` is -1; that
      call still returns, since its arguments are donated, and the next but one at the latest
      raises. ``step.lower`` takes the same arguments.

    Raises:
      ValueError: for ``accumulation``, ``max_grad_norm``, ``clip`` or ``grad_norm_every`` outside
        their range; from the step, for a batch that does not divide into workers and microbatches,
        for a ``phase`` given to an earlier call that was not the optimizer's own, for a collective
        under a condition that workers do not share, on which they would wait for each other for
        ever, and from this library's optimizers, for an axis that the mesh has not, or one of it
        that they would not average over.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = onebit_jax.onebit_adam(1e-2, warmup=20, axis_name="data")
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> params = {"w": jnp.zeros(3)}
      >>> batch = {"x": jnp.ones((16, 3)), "y": jnp.ones(16)}
      >>> opt_state = onebit_jax.init(tx, params, mesh)
      >>> step = onebit_jax.train_step(loss_fn, tx, mesh)
      >>> for _ in range(100):
      ...     params, opt_state, metrics = step(params, opt_state, batch)
      >>> int(metrics["phase"]), bool(metrics["loss"] < 0.01)
      (1, True)
    """
    validation.check_step_count("accumulation", accumulation, 1, "Give the number of microbatches.")
    if max_grad_norm is not None and not 0 < max_grad_norm < float("inf"):
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0, or None for no clipping.")
    if clip not in ("common", "local"):
        raise ValueError(f"clip={clip!r} must be 'common' or 'local'.")
    if grad_norm_every is not None:
        validation.check_step_count("grad_norm_every", grad_norm_every, 1, "Or None for never.")
    return TrainStep(loss_fn, tx, mesh, accumulation, max_grad_norm, clip, grad_norm_every)
