"""From a loss and an optimizer to a training step on a mesh."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.per_worker import is_per_worker
from onebit_jax.transforms import phases, step_sets

Metrics = dict[str, jax.Array]
Phase = phases.Phase | step_sets.Phase
LossFn = Callable[[Any, Any], jax.Array | tuple[jax.Array, Metrics]]


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


def _automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes, which take unsharded inputs whatever mesh the user made."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def init(tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh) -> optax.OptState:
    """Initialises an optimizer on a mesh; every device of the mesh is a worker.

    Args:
      tx: the optimizer; its ``axis_name`` must be the axis of the mesh, or the pair of its axes.
      params: the parameters, equal on all processes.
      mesh: a mesh over the devices of one process or of many, with one axis, or with two for the
        hierarchical exchange: ``jax.make_mesh((nodes, devices_per_node), ("node", "local"))``.

    Returns:
      The state in the mesh view: global arrays, what workers share replicated, what each has for
      itself (:class:`~onebit_jax.PerWorker`) with a leading axis that is sharded over the mesh.

    Raises:
      ValueError: from the optimizer, for an axis that the mesh has not, for one of the mesh that it
        would not average over, and for parameters that it cannot train.
    """
    mesh = _automatic(mesh)

    def on_mesh(out_specs: Any) -> Callable[[optax.Params], optax.OptState]:
        return jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)

    # The mesh is set, lest shard_map refuse it where the user has set the one it was made from.
    with use_abstract_mesh(mesh.abstract_mesh):
        specs = state_specs(jax.eval_shape(on_mesh(P()), params), mesh.axis_names)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        replicated = NamedSharding(mesh, P())
        return jax.jit(on_mesh(specs), in_shardings=replicated, out_shardings=shardings)(params)


def _loss_and_gradients(
    loss_fn: LossFn, params: optax.Params, batch: Any, accumulation: int
) -> tuple[jax.Array, Metrics, optax.Updates]:
    """Means over microbatches of the loss, its metrics and its gradients (summed in float32)."""

    def with_metrics(params: optax.Params, batch: Any) -> tuple[jax.Array, Metrics]:
        result = loss_fn(params, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)

    gradients = jax.value_and_grad(with_metrics, has_aux=True)
    if accumulation == 1:
        (loss, metrics), grads = gradients(params, batch)
        return loss, metrics, grads

    def add(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(
            lambda x, y: x + y.astype(x.dtype), total, gradients(params, microbatch)
        ), None

    microbatches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes
    )
    total, _ = lax.scan(add, zeros, microbatches)
    (loss, metrics), grads = jax.tree.map(
        lambda x, shape: (x / accumulation).astype(shape.dtype), total, shapes
    )
    return loss, metrics, grads


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
    ):
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._mesh = _automatic(mesh)
        self._replicated = NamedSharding(self._mesh, P())
        self._accumulation = accumulation
        self._max_grad_norm = max_grad_norm
        self._clip = clip
        self._jitted: dict[Any, Any] = {}

    def __call__(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        phase: Phase | None = None,
    ) -> tuple[optax.Params, optax.OptState, Metrics]:
        """Makes one update; ``params`` and ``opt_state`` are donated."""
        # Arguments placed otherwise than the results will be would cost a second compilation.
        if any(getattr(x, "sharding", None) != self._replicated for x in jax.tree.leaves(params)):
            params = jax.device_put(params, self._replicated)
        with use_abstract_mesh(self._mesh.abstract_mesh):
            return self._jit(opt_state, batch, phase)(params, opt_state, batch)

    def lower(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        phase: Phase | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, or for their shapes, without running it."""
        with use_abstract_mesh(self._mesh.abstract_mesh):
            return self._jit(opt_state, batch, phase).lower(params, opt_state, batch)

    def _jit(self, opt_state: optax.OptState, batch: Any, phase: Phase | None) -> Any:
        """The jitted step for a state of this structure."""
        self._check_batch(batch)
        key = (jax.tree.structure(opt_state), phase)
        if key not in self._jitted:
            axes = self._mesh.axis_names
            specs = state_specs(opt_state, axes)

            def step(params: Any, opt_state: Any, batch: Any) -> Any:
                return self._worker(params, opt_state, batch, phase)

            # check_vma would call a momentum varying that lies in a residual's place and yet is
            # equal on all workers. It would also sum the gradients of replicated parameters.
            mapped = jax.shard_map(
                step,
                mesh=self._mesh,
                in_specs=(P(), specs, P(axes)),
                out_specs=(P(), specs, P()),
                check_vma=False,
            )
            states = jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)
            self._jitted[key] = jax.jit(
                mapped,
                in_shardings=(self._replicated, states, NamedSharding(self._mesh, P(axes))),
                out_shardings=(self._replicated, states, self._replicated),
                donate_argnums=(0, 1),
            )
        return self._jitted[key]

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
        self, params: optax.Params, opt_state: optax.OptState, batch: Any, phase: Phase | None
    ) -> tuple[optax.Params, optax.OptState, Metrics]:
        """The step as one worker makes it, in the worker view."""
        axes = self._mesh.axis_names
        loss, metrics, grads = _loss_and_gradients(self._loss_fn, params, batch, self._accumulation)
        squared_norm = optax.tree.norm(
            jax.tree.map(lambda g: g.astype(jnp.float32), grads), squared=True
        )
        if self._max_grad_norm is not None:
            bound = squared_norm
            if self._clip == "common":
                bound = lax.pmean(squared_norm, axes)
            factor = jnp.minimum(1.0, self._max_grad_norm * lax.rsqrt(bound))
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        updates, opt_state = self._tx.update(grads, opt_state, params, phase=phase)
        params = optax.apply_updates(params, updates)

        own = {"loss": loss, "phase": jnp.int32(0), "grad_norm": squared_norm}
        for node in jax.tree.leaves(opt_state, is_leaf=_reports_metrics):
            if _reports_metrics(node):
                own |= node.metrics()
        if taken := own.keys() & metrics.keys():
            raise ValueError(
                f"loss_fn returned metrics named {sorted(taken)}, which the step has itself; "
                f"give them other names."
            )
        metrics = _mean_over_workers(metrics | own, axes)
        metrics["grad_norm"] = jnp.sqrt(metrics["grad_norm"])
        return params, opt_state, metrics


def _reports_metrics(node: Any) -> bool:
    """Whether a state has metrics of its own, as those of the one-bit optimizers do."""
    return hasattr(node, "metrics")


def _mean_over_workers(metrics: Metrics, axes: tuple[str, ...]) -> Metrics:
    """Averages float scalars in one exchange; integers are the same on all workers as they are."""
    leaves, structure = jax.tree.flatten(metrics)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    means = lax.pmean(jnp.stack([leaves[i].astype(jnp.float32) for i in floats]), axes)
    for i, mean in zip(floats, means, strict=True):
        leaves[i] = mean
    return structure.unflatten(leaves)


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    clip: Literal["common", "local"] = "common",
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

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. ``opt_state`` comes from
      :func:`onebit_jax.init`. ``batch`` is a tree of global arrays whose first axis is split over
      the workers. ``params`` and ``opt_state`` are donated. ``metrics`` are scalars on all workers:

      - ``loss``, and whatever else ``loss_fn`` returned: means over the workers;
      - ``grad_norm``: root of the workers' mean squared gradient norm, before clipping;
      - ``phase``: 0 if the update was dense, 1 if it was compressed;
      - for one-bit optimizers what their state reports, such as ``residual_ratio``.

      ``step(..., phase="warmup")`` and ``phase="compression"`` compile that phase alone, for a host
      that knows it, and for :func:`onebit_jax.zero_one_adam` so do the phases that it names;
      ``step.lower`` takes the same arguments.

    Raises:
      ValueError: for ``accumulation``, ``max_grad_norm`` or ``clip`` outside their range; from the
        step, for a batch that does not divide into workers and microbatches, and from this
        library's optimizers, for an axis of the mesh that they would not average over.

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
    return TrainStep(loss_fn, tx, mesh, accumulation, max_grad_norm, clip)
