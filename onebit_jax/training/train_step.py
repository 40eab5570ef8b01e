"""Builds a training step on a mesh from a loss and an optimizer."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.collectives.axes import sum_over_shards
from onebit_jax.collectives.error_feedback import Beside
from onebit_jax.collectives.xla_workarounds import materialize
from onebit_jax.programs.collective_check import check_collectives
from onebit_jax.programs.over_workers import mesh_of_arrays, over_workers, traced_on_mesh
from onebit_jax.programs.replica_check import check_replicas
from onebit_jax.sharded.specs import Specs
from onebit_jax.states import placement
from onebit_jax.training import agreement, phase_choice
from onebit_jax.training import model_state as model_states
from onebit_jax.training.gradients import LossAndGradients, LossFn, loss_and_gradients
from onebit_jax.training.model_state import (
    check_random_keys,
    check_shared_model_state,
    remains_finite,
    with_keys_of,
    with_own_keys,
)
from onebit_jax.training.run import Run
from onebit_jax.training.sharded_model import ShardedModel, sharded_model
from onebit_jax.transforms import phases
from onebit_jax.transforms.clip_by_common_norm import clipped
from onebit_jax.transforms.nonfinite import UPDATE, Skips, examine, no_skips, squared_norms
from onebit_jax.transforms.phases import keep
from onebit_jax.transforms.when import When
from onebit_jax.watching.metrics import Metrics, mean_over_workers, of_optimizers

Phase = phases.Phase
ParamsT = TypeVar("ParamsT")
StateT = TypeVar("StateT")
ModelStateT = TypeVar("ModelStateT")


class _Arguments(NamedTuple):
    """The arguments of a step; the first three are donated."""

    params: Any
    opt_state: Any
    model_state: Any
    batch: Any
    rng: Any
    loss_scale: Any
    extra_args: Any


def _by_donation(given: _Arguments) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(given[:3]), tuple(given[3:])


def _by_name(given: _Arguments) -> dict[str, Any]:
    return dict(zip(given._fields[:3], given[:3], strict=True))


class _Options(NamedTuple):
    """The keyword arguments of :func:`train_step`."""

    accumulation: int
    max_grad_norm: float | None
    clip: Literal["common", "local"]
    grad_norm_every: int | None
    max_skipped: int | None


class TrainStep:
    """A compiled training step; :func:`train_step` makes and documents it."""

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh | AbstractMesh,
        options: _Options,
        sharded: ShardedModel | None = None,
    ):
        self._sharded = sharded
        self._axes = mesh.axis_names if sharded is None else sharded.axes.slow_names
        self._workers = mesh.size if sharded is None else sharded.axes.workers
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(tx)
        self._mesh, self._devices = mesh, mesh_of_arrays(mesh)
        self._on_cpus = self._devices.devices.flat[0].platform == "cpu"
        self._options = options
        self._replicated = NamedSharding(self._devices, P())
        self._runs = [Run()]
        self._calls = 0
        self._placements: dict[Any, Any] = {}
        self._programs: dict[Any, Any] = {}

    @overload
    def __call__(
        self,
        params: ParamsT,
        opt_state: StateT,
        batch: Any,
        *,
        phase: Phase | None = None,
        rng: jax.Array | None = None,
        model_state: None = None,
        loss_scale: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[ParamsT, StateT, Metrics]: ...
    @overload
    def __call__(
        self,
        params: ParamsT,
        opt_state: StateT,
        batch: Any,
        *,
        phase: Phase | None = None,
        rng: jax.Array | None = None,
        model_state: ModelStateT,
        loss_scale: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[ParamsT, StateT, ModelStateT, Metrics]: ...
    def __call__(
        self,
        params: Any,
        opt_state: Any,
        batch: Any,
        *,
        phase: Phase | None = None,
        rng: jax.Array | None = None,
        model_state: Any = None,
        loss_scale: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> Any:
        """Makes one update; ``params``, ``opt_state`` and ``model_state`` are donated."""
        self._check_batch(batch)
        given = _Arguments(params, opt_state, model_state, batch, rng, loss_scale, extra_args)
        # In a jitted loop of steps the host cannot read a state's phase.
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        skips, run = no_skips(), Run()
        every = self._options.grad_norm_every
        measured = every is not None and (traced or self._calls % every == 0)
        with placement.computing_on(self._devices):
            if not traced:
                run = self._run(params, opt_state)
                if self._options.max_skipped is not None:
                    run.check(params, self._options.max_skipped)
                phase = run.phases.choose(opt_state, phase)
                # A different placement in the first call would cost a second compilation.
                replicated = jax.tree.map(lambda _: self._replicated, skips)
                skips = placement.place(run.skips[-1], replicated)
            placed = self._placed(given)
        # With the mesh itself, not its abstract form, a call and `lower` share compiled programs.
        with placement.computing_on(self._devices, concretely=not traced):
            program = self._program(placed, phase, skips)
            arguments = *_by_donation(placed), np.bool(measured), skips
            if jax.process_count() > 1 and not traced and not self._calls:
                self._check_agreement(program.trace(*arguments))
            _, results, metrics, outlook, skips = program(*arguments)
        if not traced:
            run.phases.observe(results[1], outlook, phase)
            run.observe(results[0], results[1], skips)
            self._calls += 1
        if every is not None and not measured:
            del metrics["grad_norm"]
        if model_state is None:
            return *results[:2], metrics
        return *results, metrics

    @property
    def skips(self) -> Skips:
        """The account of skipped steps after the last call.

        Its ``check(params, max_skipped)`` waits for that call, and raises after ``max_skipped``
        skipped steps in a row: call it after a run's last step, which no later call checks.
        """
        return self._runs[-1].skips[-1]

    def _run(self, params: optax.Params, opt_state: optax.OptState) -> Run:
        """The run that this state continues, or a new one; it becomes the last in the list."""
        others = [run for run in self._runs if not run.is_over()]
        run = next((run for run in others if run.returned(params, opt_state)), None)
        self._runs = [x for x in others if x is not run] + [run or Run()]
        return self._runs[-1]

    def lower(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        *,
        phase: Phase | None = None,
        rng: jax.Array | None = None,
        model_state: Any = None,
        loss_scale: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> jax.stages.Lowered:
        """Lowers the step for these arguments, or for their shapes, without running it.

        A call with arguments of these shapes and this ``phase`` shares the compiled program.

        Without ``phase`` the program contains all phases and chooses on the devices; a call without
        ``phase`` runs another program.
        """
        self._check_batch(batch)
        given = _Arguments(params, opt_state, model_state, batch, rng, loss_scale, extra_args)
        with placement.computing_on(self._devices):
            shapes, skips = jax.eval_shape(lambda x: x, (given, no_skips()))
            placed = jax.tree.map(
                lambda x, sharding: x.update(sharding=sharding),
                shapes,
                self._placement(shapes._replace(batch=batch)),
            )
        skips = jax.tree.map(lambda x: x.update(sharding=self._replicated), skips)
        with placement.computing_on(self._devices, concretely=True):
            program = self._program(placed, phase, skips)
            return program.lower(*_by_donation(placed), np.bool(True), skips)

    def _placement(self, given: _Arguments) -> _Arguments:
        """The shardings of the arguments, in a tree like theirs."""
        key = self._structure(given)
        if key not in self._placements:
            axes = self._mesh.axis_names
            # Of a sharded model specs are known once parameters are checked.
            self._check(given)
            if self._sharded is None:
                own = {
                    "opt_state": placement.state_specs(given.opt_state, axes),
                    "batch": jax.tree.map(lambda _: P(axes), given.batch),
                }
            else:
                own = {
                    "params": self._sharded.specs(given.params),
                    "opt_state": self._sharded.state_specs(given.params),
                    "batch": self._sharded.batch_specs(given.batch),
                }
            specs = jax.tree.map(lambda _: P(), given)._replace(**own)
            self._placements[key] = jax.tree.map(
                lambda spec: NamedSharding(self._devices, spec), specs
            )
        return self._placements[key]

    def _structure(self, given: _Arguments) -> Any:
        """What programs and placements are made for."""
        structure = jax.tree.structure(given)
        if self._sharded is None:
            return structure
        return structure, tuple(jax.tree.leaves(self._sharded.batch_specs(given.batch)))

    def _placed(self, given: _Arguments) -> _Arguments:
        """Places the arguments, and checks any state that an earlier step did not place."""
        placement.check_donated(_by_name(given))
        known = len(self._placements)
        shardings = self._placement(given)
        state = zip(
            jax.tree.leaves((given.params, given.opt_state)),
            jax.tree.leaves((shardings.params, shardings.opt_state)),
            strict=True,
        )
        if len(self._placements) == known and not all(
            placement.is_placed(x, sharding) for x, sharding in state
        ):
            self._check(given)
        rng = (
            given.rng if given.rng is None else placement.place_random_key(given.rng, shardings.rng)
        )
        placed = placement.place(given._replace(rng=None), shardings._replace(rng=None))
        return placed._replace(rng=rng)

    def _check(self, given: _Arguments) -> None:
        """Checks arguments for users' errors, by shapes and types alone."""
        params, opt_state = given.params, given.opt_state
        placement.check_donated(_by_name(given), placement.buffer)
        check_random_keys(given.rng, given.batch)
        if self._sharded is not None:
            self._sharded.check_state(params, opt_state)
            return
        placement.check_whole(params)
        shapes = placement.state_shapes(self._tx, params, self._mesh)
        placement.check_simulated(shapes, self._mesh)
        placement.check_plans(self._tx, params, opt_state, self._mesh)
        placement.check_state(opt_state, shapes, self._mesh)
        specs = placement.state_specs(shapes, self._mesh.axis_names)
        check_replicas(self._tx, params, shapes, specs, self._mesh, given.extra_args)

    def _program(self, placed: _Arguments, phase: Phase | None, skips: Skips) -> Any:
        """The jitted step for placed arguments of this structure."""
        key = (self._structure(placed), phase)
        if key not in self._programs:
            replicated = self._replicated
            inputs = (*_by_donation(self._placement(placed)), replicated, replicated)
            # What stays of the state comes first: JAX gives the memory of an argument to the first
            # result of its shape.
            stays = jax.tree.leaves(inputs[0][1])
            outputs = stays, inputs[0], replicated, replicated, replicated

            def step(donated: Any, others: Any, measured: Any, skips: Skips) -> Any:
                return self._worker(_Arguments(*donated, *others), measured, skips, phase)

            def sharded_step(donated: Any, others: Any, measured: Any, skips: Skips) -> Any:
                return self._of_shards(_Arguments(*donated, *others), measured, skips, phase)

            mapped = sharded_step
            if self._sharded is None:
                in_specs, out_specs = jax.tree.map(lambda x: x.spec, (inputs, outputs))
                mapped = over_workers(step, self._mesh, in_specs, out_specs)
            program = jax.jit(mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=0)
            arguments = *_by_donation(placed), np.bool(True), skips
            traced = program.trace(*arguments)
            if isinstance(self._mesh, AbstractMesh):
                traced = traced_on_mesh(step, self._mesh, in_specs, out_specs, arguments)
            varies = check_collectives(traced.jaxpr.jaxpr)
            _, (_, _, model_state), *_ = jax.tree.unflatten(
                jax.tree.structure(traced.out_info), varies
            )
            check_shared_model_state(model_state)
            self._programs[key] = program
        return self._programs[key]

    def _check_agreement(self, traced: jax.stages.Traced) -> None:
        agreement.check_agreement(
            self._options._asdict()
            | {"the mesh": (self._mesh.shape, self._devices.device_ids.tolist())}
            | agreement.settings()
            | {
                "the loss, the optimizer or the shapes of the arguments": agreement.outline(
                    traced.jaxpr.jaxpr
                )
            }
        )

    def _check_batch(self, batch: Any) -> None:
        parts = self._workers * self._options.accumulation
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape = np.shape(leaf)
            if not shape or shape[0] % parts or not shape[0]:
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has shape {shape}, but its first axis "
                    f"must be a multiple of {parts} = {self._workers} workers x accumulation "
                    f"{self._options.accumulation}. Change the batch size or the accumulation."
                )

    def _worker(
        self, given: _Arguments, measured: jax.Array, skips: Skips, phase: Phase | None
    ) -> tuple[list[jax.Array | None], tuple[Any, Any, Any], Metrics, jax.Array, Skips]:
        """One worker's step, in the worker view, with the upcoming phases and skipped steps.

        First come the state's old arrays that new ones are written beside, None for the others.
        """
        own = phase_choice.worker_parameters(given.opt_state, given.params)
        computed = self._gradients(given._replace(params=own), lax.axis_index(self._axes))
        beside = Beside([], one_message=self._on_cpus)
        made = self._update(given, computed, measured, skips, phase, beside=beside)
        return beside.stays(given.opt_state), *made

    def _gradients(self, given: _Arguments, worker: jax.Array) -> LossAndGradients:
        """What one worker computes of its share of the batch."""
        rng = given.rng
        if rng is not None:
            rng = jax.random.fold_in(rng, worker)
        return loss_and_gradients(
            self._loss_fn,
            given.params,
            given.batch,
            self._options.accumulation,
            rng,
            with_own_keys(given.model_state, worker),
            given.loss_scale,
            interleaved=self._sharded is not None,
        )

    def _of_shards(
        self, given: _Arguments, measured: jax.Array, skips: Skips, phase: Phase | None
    ) -> tuple[list[jax.Array | None], tuple[Any, Any, Any], Metrics, jax.Array, Skips]:
        """All workers' step where each is several devices; results as for :meth:`_worker`."""
        sharded = cast(ShardedModel, self._sharded)
        beside = Beside([], one_message=self._on_cpus)
        copies = sharded.copies(given.params)
        differs = model_states.by_worker(given.model_state)
        structure = jax.tree.structure(given.model_state)

        def gradients(params: Any, batch: Any, worker: jax.Array) -> LossAndGradients:
            return self._gradients(given._replace(params=params, batch=batch), worker)

        def update(params: Any, opt_state: Any, grads: Any, rows: Any, shared: Any) -> Any:
            measured, skips, extra_args, model_state, in_common = shared
            own = given._replace(
                params=params,
                opt_state=opt_state,
                model_state=model_state,
                extra_args=extra_args,
            )
            if self._on_cpus and self._options.max_skipped is not None:
                # XLA for CPUs holds gradients transposed here; check and update would each
                # transpose them.
                grads = jax.tree.map(lambda g: materialize(g, self._axes[0]), grads)
            loss, metrics, leaves = rows
            leaves = [x if x is not None else y for x, y in zip(leaves, in_common, strict=True)]
            computed = LossAndGradients(loss, metrics, grads, structure.unflatten(leaves))
            results, *others = self._update(own, computed, measured, skips, phase, copies, beside)
            return *results[:2], (results[2], *others)

        own = sharded.own_parameters(given.params, given.opt_state)
        out_axes = jax.tree.map(lambda differs: 0 if differs else None, differs)
        of_workers = cast(Any, LossAndGradients)(0, 0, 0, out_axes)
        computed = sharded.by_worker(gradients, own, given.batch, of_workers)
        leaves = list(
            zip(jax.tree.leaves(computed.model_state), jax.tree.leaves(differs), strict=True)
        )
        stays, params, opt_state, (model_state, *others) = sharded.on_shards(
            update,
            beside,
            given.params,
            given.opt_state,
            computed.grads,
            (computed.loss, computed.metrics, [x if own else None for x, own in leaves]),
            (
                measured,
                skips,
                given.extra_args,
                given.model_state,
                [None if own else x for x, own in leaves],
            ),
        )
        return stays, (params, opt_state, model_state), *others

    def _update(
        self,
        given: _Arguments,
        computed: LossAndGradients,
        measured: jax.Array,
        skips: Skips,
        phase: Phase | None,
        copies: Sequence[int] | None = None,
        beside: Beside | None = None,
    ) -> tuple[tuple[Any, Any, Any], Metrics, jax.Array, Skips]:
        """One worker's update, in the worker view; of shards each place holds so many copies.

        ``beside`` is as for :class:`~onebit_jax.transforms.when.When`.
        """
        axes = self._axes
        loss, metrics, grads, model_state = computed
        own = {"loss": loss.astype(jnp.float32)}
        if self._options.grad_norm_every is not None:
            own["grad_norm"] = self._squared_norm(grads, measured, copies)
        health = when = None
        if self._options.max_skipped is not None:
            finite = remains_finite(given.model_state, model_state)
            health = examine(grads, axes, jnp.where(finite, loss, jnp.nan), copies)
            when = When(health.fit, beside)
        if self._options.max_grad_norm is not None:
            bound = own["grad_norm"]
            if self._options.clip == "common":
                bound = lax.pmean(bound, axes) if health is None else health.squared_norm
            grads = clipped(grads, bound, self._options.max_grad_norm)
        params, opt_state, outlook, finite = phase_choice.update(
            self._tx,
            grads,
            given.opt_state,
            given.params,
            phase,
            given.extra_args,
            when,
            in_loop=self._on_cpus,
        )

        own |= of_optimizers(opt_state)
        reserved = own.keys() | (set() if health is None else skips.metrics().keys())
        if taken := reserved & metrics.keys():
            raise ValueError(
                f"loss_fn returned metrics named {sorted(taken)}, which the step has itself; "
                f"give them other names."
            )
        finite = None if health is None else finite.astype(jnp.float32)
        # What optimizers report may differ between shards, and then is averaged over these too.
        metrics, model_state, finite = mean_over_workers(
            (metrics | own, model_state, finite), self._mesh.axis_names
        )
        if self._options.grad_norm_every is not None:
            metrics["grad_norm"] = jnp.sqrt(metrics["grad_norm"])
        model_state = with_keys_of(given.model_state, model_state)
        if health is not None:
            fit = health.fit & (finite == 1)
            to_blame = jnp.where(health.fit, UPDATE, health.tensor)
            skips = skips.after(health._replace(fit=fit, tensor=to_blame))
            metrics |= skips.metrics()
            model_state = keep(fit, model_state, given.model_state)
        return (params, opt_state, model_state), metrics, outlook, skips

    def _squared_norm(
        self, grads: optax.Updates, measured: jax.Array, copies: Sequence[int] | None
    ) -> jax.Array:
        def whole(grads: optax.Updates) -> jax.Array:
            return jnp.sum(sum_over_shards(squared_norms(grads, copies)))

        if self._options.grad_norm_every == 1:
            return whole(grads)
        return lax.cond(measured, whole, lambda _: jnp.float32(0), grads)


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    clip: Literal["common", "local"] = "common",
    grad_norm_every: int | None = None,
    max_skipped: int | None = 10,
) -> TrainStep:
    r"""Builds a training step in which every device of a mesh is a worker.

    Each worker computes the gradient of its own share of the batch and passes it to the optimizer;
    nothing is averaged before it. The objective is the mean of the workers' losses.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returns a scalar, the mean over its batch, or this scalar
        and a dict of scalar metrics. If the step is called with a random key or a model's state,
        ``loss_fn`` takes ``rng`` and ``model_state`` by keyword; with a ``model_state`` it returns
        ``loss, metrics, model_state``.
      tx: the optimizer. It must average over the mesh itself, as this library's optimizers do; put
        :func:`onebit_jax.mean_gradients` before a dense one.
      mesh: as for :func:`init`; all its devices are workers, along all its axes, unless
        ``axis_name`` says otherwise.
      axis_name: as for :func:`init`: the slow axis of a mesh that has fast ones too, over which the
        model is split. A worker is then all devices of one place along it. ``loss_fn`` computes
        with whole parameters and a worker's whole share, which the compiler splits, and may say
        how by ``jax.lax.with_sharding_constraint``. Place the batch over the fast axes that are to
        share it, as by ``NamedSharding(mesh, P(("data", "fsdp")))``; norms and what optimizers
        report are of whole tensors, or means over shards. A ``model_state`` is whole everywhere.
      param_specs: as for :func:`init`.
      accumulation: the number of microbatches into which a worker's share is divided; their
        gradients are averaged in float32.
      max_skipped: the number of skipped steps in a row after which a call raises. All workers skip
        a step if one worker's loss, gradient or new model state is not finite, or its gradient's
        norm is above ``2**48``. Parameters, states and random keys stay as they were, bit for bit.
        Each worker sends two float32 besides the exchange, and one with the metrics; the norm takes
        a pass over the gradients, which clipping needs anyway. None turns the check off: one
        worker's NaN then stays in all parameters and residuals.

        An update that is not finite, because of a schedule of the learning rate or of the decay, is
        detected only after it is made: parameters stay as they were and the step counts as skipped,
        but the optimizer's state has changed. The check reads the smallest update of a matrix, of a
        vector and so on, since a pass over all updates would cost as much as writing them.
        Optimizers whose states hold updates (``local_steps``, ``zero_one_adam``, ``ef_signsgd``) do
        not recover, and raise after ``max_skipped`` steps.
      max_grad_norm: clips gradients before the optimizer sees them; None for no clipping.
      clip: ``"common"`` multiplies all workers' gradients by one factor, so that the root of their
        mean squared norm is at most ``max_grad_norm`` (one more float32 in the exchange).
        ``"local"`` clips each worker's gradient by its norm, which biases the mean towards workers
        with small gradients.
      grad_norm_every: measures the norm of the gradients, which takes a pass over them, in the
        first call and every ``grad_norm_every`` calls after it. None for never. If gradients are
        clipped, every call measures it.

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. ``opt_state`` comes from
      :func:`onebit_jax.init`. ``batch`` is a tree of global arrays whose first axis is split over
      the workers. ``params`` and ``opt_state`` are donated. Optional keyword arguments are

      - ``rng``, one random key, a new one for every step: each worker, and each microbatch, gets
        its own, folded from it;
      - ``model_state``, which the model changes without gradients, such as batch statistics: the
        step then returns ``(params, opt_state, model_state, metrics)``, and it is donated too. Each
        worker changes it on its own share of the batch, one microbatch after the other; then float
        leaves are averaged over the workers, together with the metrics. Other leaves must become
        equal on all workers. Random keys in it, as of Flax NNX, are folded for each worker;
      - ``loss_scale``, a factor of the loss by which gradients are divided again afterwards, for
        gradients that float16 would round to 0;
      - any argument of the optimizer's ``update``, the same on all workers, such as ``value`` for
        :func:`optax.contrib.reduce_on_plateau`: the loss of an earlier step costs no waiting.

      ``metrics`` are scalars on all workers:

      - ``loss`` and the metrics that ``loss_fn`` returned: means over the workers;
      - ``grad_norm``, in calls that measure it: the root of the workers' mean squared gradient
        norm, before clipping;
      - ``phase`` of the update, by its place in "warmup", "compression", "local", "sync" and
        "refresh"; -1 if it was refused, 0 for an optimizer without phases;
      - ``skipped``, the number of skipped steps of this run, and ``skipped_in_a_row``, unless
        ``max_skipped`` is None;
      - further metrics of the optimizer's state, such as ``residual_ratio``. If several optimizers
        in one ``optax.partition`` report the same metric, labels distinguish: ``matrices/phase``.

      Each phase of an optimizer is compiled separately, at the first call that needs it. A call
      reads the next phase from the result of the update before the last, and so waits for that
      update: at most two updates run at a time. At a change of phase, and while
      :func:`onebit_jax.variance_stable` may end the warm-up at any update, it waits for the last
      one. Optimizers that are in different phases use a program that contains all phases.

      One step may serve several runs, alternately or one after the other. A call with the state
      that an earlier call returned continues that call's run; any other state begins a run. After
      an error for skipped steps the same state may be passed again, with good batches. No call
      checks the steps after it: ``step.skips.check(params, max_skipped)`` after the last call waits
      for that call and raises if the last ``max_skipped`` steps were skipped.

      Inside ``jax.jit``, as in a ``lax.scan`` of the step, no account passes from one step to the
      next: ``skipped`` and ``skipped_in_a_row`` are 0 or 1, and no step raises. Count there with
      ``max_skipped=None`` and :func:`onebit_jax.skip_nonfinite` around ``tx``. Such a loop runs the
      program of all phases, whose results may differ in the last bits from those of calls.

      Several processes compare their options, their settings of JAX and their programs at the first
      call, and all raise if these differ. Later each process waits in a collective for all others,
      as long as JAX's runtime permits.

      The step uses JAX's defaults for dtype and rank promotion, transfer guards, ``jax_debug_nans``
      and ``jax_debug_infs``, and overrides the user's settings.

      Pass ``phase``, as in ``step(..., phase="compression")``, if the host knows the phase. A wrong
      phase changes neither parameters nor state, and the metric ``phase`` is -1. That call returns,
      since its arguments are donated; one of the next two calls raises. ``step.lower`` takes the
      same arguments.

    Raises:
      NonFiniteError: from the step, after ``max_skipped`` skipped steps in a row, the last of them
        two calls ago or earlier.
      ValueError: for ``accumulation``, ``max_grad_norm``, ``clip``, ``grad_norm_every`` or
        ``max_skipped`` outside their range, and a ``tx`` or ``mesh`` of the wrong type. From the
        step, before anything is compiled: for a batch that does not divide into workers and
        microbatches; a state that does not fit the optimizer, these parameters and this mesh, lacks
        :class:`~onebit_jax.PerWorker` nodes, or was saved by a :func:`onebit_jax.local_steps` with
        another schedule; parameters that are split between devices; an array that would be donated
        twice, or was donated before; an ``rng`` that is not a single key, and equal keys in a
        batch; a ``loss_fn`` whose results have a wrong type or shape; updates that would differ
        between workers, with the parameter's name; a collective under a condition that may differ
        between workers, which would then wait for each other for ever; processes with different
        steps; ``jax_disable_jit``. For a wrong ``phase`` in an earlier call; and from this
        library's optimizers, for an axis that is not in the mesh, or a mesh axis that they would
        not average over.

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
      >>> bool(metrics["loss"] < 0.01)
      True
    """
    validation.check_transformation("tx", tx)
    sharded = sharded_model(tx, mesh, axis_name, param_specs)
    validation.check_step_count("accumulation", accumulation, 1, "Give the number of microbatches.")
    if max_grad_norm is not None:
        validation.check_positive("max_grad_norm", max_grad_norm, usual=1.0)
    validation.check_name("clip", clip, "common", "local")
    if grad_norm_every is not None:
        validation.check_step_count("grad_norm_every", grad_norm_every, 1, "Or None for never.")
    if max_skipped is not None:
        validation.check_step_count("max_skipped", max_skipped, 1, "Or None, to look at nothing.")
    # Clipping computes the norm in every step.
    every = grad_norm_every if max_grad_norm is None else 1
    options = _Options(accumulation, max_grad_norm, clip, every, max_skipped)
    return TrainStep(loss_fn, tx, mesh, options, sharded)
