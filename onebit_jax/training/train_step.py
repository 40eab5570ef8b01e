"""Builds a training step on a mesh from a loss and an optimizer."""

from typing import Any, Literal, TypeVar, overload

import jax
import jax.core
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.programs.collective_check import check_collectives
from onebit_jax.programs.over_workers import over_workers, traced_on_mesh
from onebit_jax.states import placement
from onebit_jax.states.sharded_model import sharded_model
from onebit_jax.states.specs import Specs
from onebit_jax.training import agreement
from onebit_jax.training.arguments import Arguments, Options, Placements, Setup, check_batch
from onebit_jax.training.gradients import LossFn
from onebit_jax.training.model_state import check_shared_model_state
from onebit_jax.training.run import Run
from onebit_jax.training.step_function import Results, replicated_step, sharded_step
from onebit_jax.transforms.nonfinite import Skips
from onebit_jax.transforms.phases import Phase
from onebit_jax.watching.metrics import Metrics

ParamsT = TypeVar("ParamsT")
StateT = TypeVar("StateT")
ModelStateT = TypeVar("ModelStateT")


class TrainStep:
    """A compiled training step; :func:`train_step` makes and documents it."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._placements = Placements(setup)
        self._programs: dict[Any, Any] = {}
        self._runs = [Run()]
        self._calls = 0

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
        check_batch(self._setup, batch)
        validation.check_loss_scale(loss_scale)
        given = Arguments(params, opt_state, model_state, batch, rng, loss_scale, extra_args)
        # Before the phase is read from the state.
        placement.check_donated(given.donated())
        # In a jitted loop of steps the host cannot read a state's phase.
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        options, run = self._setup.options, Run()
        every = options.grad_norm_every
        measured = every is not None and (traced or self._calls % every == 0)
        with placement.computing_on(self._setup.devices):
            if not traced:
                run = self._run(params, opt_state)
                if options.max_skipped is not None:
                    run.check(params, options.max_skipped)
                phase = run.phases.choose(opt_state, phase)
            given = given._replace(measured=np.bool(measured), skips=run.skips[-1])
            placed = self._placements.place(given)
            several = jax.process_count() > 1 and not traced
            if several and not self._calls:
                agreement.check_options(self._setup, placed)
            if several and run.is_new:
                agreement.check_values(placed)
        # With the mesh itself, not its abstract form, a call and `lower` share compiled programs.
        with placement.computing_on(self._setup.devices, concretely=not traced):
            program = self._program(placed, phase)
            if several and not self._calls:
                agreement.check_program(program.trace(*placed.by_donation()).jaxpr)
            _, results, metrics, outlook, skips = program(*placed.by_donation())
        if not traced:
            run.phases.observe(results[1], outlook, phase)
            run.observe(results[0], results[1], skips)
            self._calls += 1
        if every is not None and not measured:
            del metrics["grad_norm"]
        if model_state is None:
            return *results[:2], metrics
        return *results, metrics

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
        ``phase`` runs another program. Arguments are those of a call.

        Returns:
          What ``jax.jit`` lowers to, to compile or to give to ``onebit_jax.wire``.

        Raises:
          ValueError: as a call does before its program runs.
        """
        check_batch(self._setup, batch)
        validation.check_loss_scale(loss_scale)
        given = Arguments(params, opt_state, model_state, batch, rng, loss_scale, extra_args)
        with placement.computing_on(self._setup.devices):
            shapes = jax.eval_shape(lambda x: x, given)
            shardings = self._placements.shardings(shapes._replace(batch=batch))
            placed = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, shardings)
        # A call does not place this scalar; a placed one would be traced again.
        placed = placed._replace(measured=given.measured)
        with placement.computing_on(self._setup.devices, concretely=True):
            return self._program(placed, phase).lower(*placed.by_donation())

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

    def _program(self, placed: Arguments, phase: Phase | None) -> Any:
        """The jitted step for placed arguments of this structure."""
        key = self._placements.structure(placed), phase
        if key not in self._programs:
            shardings = self._placements.shardings(placed)
            self._programs[key] = _jitted(self._setup, placed, shardings, phase)
        return self._programs[key]


def _jitted(setup: Setup, placed: Arguments, shardings: Arguments, phase: Phase | None) -> Any:
    """The jitted step, once its collectives and the model's state are checked."""
    step_of_workers = replicated_step if setup.sharded is None else sharded_step

    def step(donated: Any, others: Any) -> Results:
        return step_of_workers(setup, Arguments(*donated, *others), phase)

    inputs, replicated = shardings.by_donation(), NamedSharding(setup.devices, P())
    # What stays of the state comes first: JAX gives the memory of an argument to the first result
    # of its shape.
    outputs = jax.tree.leaves(inputs[0][1]), inputs[0], replicated, replicated, replicated
    in_specs, out_specs = jax.tree.map(lambda x: x.spec, (inputs, outputs))
    mapped = step
    if setup.sharded is None:
        mapped = over_workers(step, setup.mesh, in_specs, out_specs)
    program = jax.jit(mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=0)
    traced = program.trace(*placed.by_donation())
    if isinstance(setup.mesh, AbstractMesh):
        traced = traced_on_mesh(step, setup.mesh, in_specs, out_specs, placed.by_donation())
    varies = check_collectives(traced.jaxpr.jaxpr)
    _, (_, _, model_state), *_ = jax.tree.unflatten(jax.tree.structure(traced.out_info), varies)
    check_shared_model_state(model_state)
    return program


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
        model is split. A worker is then all devices with one index along it. ``loss_fn`` computes
        with whole parameters and a worker's whole share, which the compiler splits, and may say
        how by ``jax.lax.with_sharding_constraint``. Place the batch over the fast axes that are to
        share it, as by ``NamedSharding(mesh, P(("data", "fsdp")))``; norms and what optimizers
        report are of whole tensors, or means over shards. A ``model_state`` is whole everywhere.
      param_specs: as for :func:`init`.
      accumulation: the number of microbatches into which a worker's share is divided; their
        gradients are averaged in float32.
      max_grad_norm: clips gradients before the optimizer sees them; None for no clipping.
      clip: ``"common"`` multiplies all workers' gradients by one factor, so that the root of their
        mean squared norm is at most ``max_grad_norm`` (one more float32 in the exchange).
        ``"local"`` clips each worker's gradient by its norm, which biases the mean towards workers
        with small gradients.
      grad_norm_every: measures the norm of the gradients, which takes a pass over them, in the
        first call and every ``grad_norm_every`` calls after it. None for never. If gradients are
        clipped, every call measures it.
      max_skipped: the number of skipped steps in a row after which a call raises. All workers skip
        a step if one worker's loss, gradient or new model state is not finite, or its gradient's
        norm is above ``2**48``. Parameters, states and random keys stay as they were, bit for bit.
        Each worker sends two float32 besides the exchange, and one with the metrics; the norm takes
        a pass over the gradients, which clipping needs anyway. None turns the check off: one
        worker's NaN then stays in all parameters and residuals.

        An update that is not finite, because of a schedule of the learning rate or of the decay, is
        detected only after it is made: parameters stay as they were and the step counts as skipped,
        but the optimizer's state has changed. The check reads the smallest update of a matrix, of a
        vector and so on, since a pass over all updates would cost as much as writing them: of
        groups in an ``optax.partition``, each with its own schedule, it may read one alone.
        Optimizers whose states hold updates (``local_steps``, ``zero_one_adam``, ``ef_signsgd``) do
        not recover, and raise after ``max_skipped`` steps.

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
      - ``loss_scale``, a factor of the loss above 0, by which gradients are divided again
        afterwards, for gradients that float16 would round to 0;
      - any argument of the optimizer's ``update``, the same on all workers, such as ``value`` for
        :func:`optax.contrib.reduce_on_plateau`: the loss of an earlier step costs no waiting.

      ``metrics`` are scalars on all workers:

      - ``loss`` and the metrics that ``loss_fn`` returned: means over the workers;
      - ``grad_norm``, in calls that measure it: the root of the workers' mean squared gradient
        norm, before clipping;
      - ``phase`` of the update, by its place in "warmup", "compression", "local", "sync" and
        "refresh"; -1 if it was refused, or skipped before any was made; 0 for an optimizer without
        phases;
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
      call, and of a state that no call returned, such as a restored one, all that workers share;
      all raise if these differ. Later each process waits in a collective for all others, as long as
      JAX's runtime permits.

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
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={loss_fn!r:.60} must be a function of parameters and a worker's share of the "
            f"batch that returns the loss."
        )
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
    options = Options(accumulation, max_grad_norm, clip, every, max_skipped)
    return TrainStep(Setup(loss_fn, optax.with_extra_args_support(tx), mesh, sharded, options))
