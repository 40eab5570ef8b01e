"""Builds a training step on a mesh from a loss and an optimizer."""

import collections
import warnings
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.markers import named_leaves
from onebit_jax.programs.jaxprs import axes_of_results, refuse_differing
from onebit_jax.programs.over_workers import over_workers, traced_on_mesh
from onebit_jax.states.placement import Workers, computing_on, place
from onebit_jax.states.resizing import put
from onebit_jax.states.specs import Specs, names_in
from onebit_jax.training.agreement import check_agreement
from onebit_jax.training.gradients import LossFn
from onebit_jax.training.step import Arguments, Results, Setup, split_step, whole_step
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Phase, phase_of, states_of
from onebit_jax.transforms.skip_nonfinite import NonFiniteError, Skips, no_skips

# Steps skipped so often deserve a word, though never many in a row.
_MANY_SKIPS, _SHARE = 10, 0.1
# The columns of an outlook.
_REFUSED, _COUNT, _NEXT, _AFTER_NEXT = range(4)


class Run:
    """The run that a step makes: the phase of the next update, and the account of skipped steps.

    A call reads results of the call before the last one, so that it does not wait for the last.
    """

    def __init__(self):
        self.skips: collections.deque[Skips] = collections.deque([no_skips()], maxlen=2)
        self._outlooks: collections.deque[tuple[Any, Phase | None]] = collections.deque(maxlen=2)
        self._returned: Any = lambda: None
        self._warned = False

    def continues(self, opt_state: Any) -> bool:
        """Whether the last call returned this state."""
        return self._returned() is not None and self._returned() is _mark(opt_state)

    def observe(self, results: Results, phase: Phase | None) -> None:
        """Takes note of an update that was dispatched."""
        mark = _mark(results.opt_state)
        self._returned = weakref.ref(mark) if mark is not None else lambda: None
        self.skips.append(results.skips)
        self._outlooks.append((results.outlook, phase))

    def next_phase(self, opt_state: Any, given: Phase | None) -> Phase | None:
        """The phase to compile the next update for; None for all of them.

        Raises:
          ValueError: an optimizer refused a phase that was given two or one updates ago.
        """
        if not self._outlooks:
            found = [x.progress.upcoming for x in states_of(opt_state)]
            firsts = [_first(x) for x in found if not isinstance(x, tuple)]
        else:
            known = self._read(0)
            if len(self._outlooks) == 2 and np.any(known[:, _NEXT] != known[:, _AFTER_NEXT]):
                known = self._read(1)
            firsts = known[:, _NEXT].tolist()
        if given is not None or not firsts:
            return given
        return phase_of(firsts[0]) if len(set(firsts)) == 1 and firsts[0] >= 0 else None

    def _read(self, which: int) -> np.ndarray:
        outlook, phase = self._outlooks[which]
        rows = np.asarray(outlook)
        for row in rows[rows[:, _REFUSED] > 0]:
            self._outlooks.clear()
            raise ValueError(
                f"phase={phase!r} was given, but the optimizer's update {row[_COUNT] + 1} is in "
                f"{phase_of(int(row[_NEXT]))!r}: parameters and state were left as they were. Go "
                f"on from those that the step returned, and leave phase out."
            )
        return rows

    def check_skips(self, params: optax.Params, max_skipped: int) -> None:
        """Raises ``NonFiniteError`` after too many skipped steps; the run may then continue."""
        skips = self.skips[0]
        try:
            skips.check(params, max_skipped)
        except NonFiniteError:
            last = self.skips[-1]
            self.skips.clear()
            self.skips.append(last._replace(in_a_row=np.zeros_like(last.in_a_row)))
            raise
        skipped, steps = int(skips.skipped), int(skips.steps)
        if skipped >= max(_MANY_SKIPS, _SHARE * steps) and not self._warned:
            self._warned = True
            text = f"{skipped} of {steps} steps were skipped, last for worker {int(skips.worker)}."
            mend = "A mean over no tokens is not finite: return onebit_jax.WeightedLoss."
            warnings.warn(f"{text} {mend}", stacklevel=3)


def _mark(opt_state: Any) -> Any:
    """An array by which a state is known: its first, which every update makes anew."""
    return next(iter(jax.tree.leaves(opt_state)), None)


def _first(upcoming: Any) -> int:
    here = upcoming.addressable_data(0) if isinstance(upcoming, jax.Array) else upcoming
    return int(np.asarray(here).flat[0])


class TrainStep:
    """A compiled training step; :func:`onebit_jax.train_step` makes and documents it."""

    def __init__(self, setup: Setup):
        self._setup, self._run = setup, Run()
        self._plans: dict[Any, Plan] = {}
        self._programs: dict[Any, Any] = {}
        self._agreed = False

    def __call__(
        self,
        params: Any,
        opt_state: Any,
        batch: Any,
        *,
        phase: Phase | None = None,
        rng: jax.Array | None = None,
        model_state: Any = None,
        **extra_args: Any,
    ) -> Any:
        """Makes one update; ``params``, ``opt_state`` and ``model_state`` are donated.

        Arrays of the state that the update does not change are in the old and in the new state.
        """
        given = _arguments(params, opt_state, batch, rng, model_state, **extra_args)
        setup = self._setup
        # In a jitted loop of steps the host cannot read a state's phase.
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
            with computing_on(setup.workers.devices):
                plan = self._plan(given)
                placed = place(given, plan.shardings)
                results = self._program(plan, placed, phase)(*_parts(setup, placed, phase))
                return self._returned(results, placed, phase)
        is_new = not self._run.continues(opt_state)
        if is_new:
            self._run = Run()
            setup.workers.check_state(params, opt_state)
        if setup.max_skipped is not None:
            self._run.check_skips(params, setup.max_skipped)
        phase = self._run.next_phase(opt_state, phase)
        given = given._replace(skips=self._run.skips[-1])
        with computing_on(setup.workers.devices):
            plan = self._plan(given)
            if rng is not None and jax.process_count() > 1:
                # Without asking other processes, as device_put would.
                given = given._replace(rng=put(rng, plan.shardings.rng))
            placed = place(given, plan.shardings)
        with computing_on(setup.workers.devices, concretely=True):
            program = self._program(plan, placed, phase)
            if jax.process_count() > 1 and (is_new or not self._agreed):
                check_agreement(setup, placed, program.lower(*_parts(setup, placed, phase)))
                self._agreed = True
            results = program(*_parts(setup, placed, phase))
        self._run.observe(results, phase)
        return self._returned(results, placed, phase)

    def _returned(self, results: Results, given: Arguments, phase: Phase | None) -> Any:
        _, _, (kept, *_) = _parts(self._setup, given, phase)
        opt_state = algorithm.with_unchanged(results.opt_state, kept, phase)
        if results.model_state is None:
            return results.params, opt_state, results.metrics
        return results.params, opt_state, results.model_state, results.metrics

    def lower(self, *args: Any, phase: Phase | None = None, **named: Any) -> jax.stages.Lowered:
        """Lowers the step for the arguments of a call, or for their shapes, without running it."""
        given = _arguments(*args, **named)
        with computing_on(self._setup.workers.devices):
            plan = self._plan(given)
            shapes = jax.eval_shape(lambda x: x, given)
            placed = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, plan.shardings)
        with computing_on(self._setup.workers.devices, concretely=True):
            return self._program(plan, placed, phase).lower(*_parts(self._setup, placed, phase))

    @property
    def skips(self) -> Skips:
        """The account of skipped steps after the last call."""
        return self._run.skips[-1]

    def _plan(self, given: Arguments) -> "Plan":
        """How arguments of these shapes, that lie so, are to lie; made, and checked, once."""
        arrays, structure = jax.tree.flatten(given)
        shapes = tuple((np.shape(x), jax.numpy.result_type(x)) for x in arrays)
        key = structure, shapes, *(getattr(x, "sharding", None) for x in arrays)
        if key not in self._plans:
            workers, params = self._setup.workers, given.params
            specs = jax.tree.map(lambda _: P(), given)._replace(
                params=workers.specs(params),
                opt_state=workers.state_specs(params),
                batch=jax.tree_util.tree_map_with_path(self._batch_spec, given.batch),
            )
            workers.check(params, given.extra_args)
            kinds = structure, shapes, *jax.tree.leaves(specs)
            self._plans[key] = Plan(specs, workers.shardings(specs), kinds)
        return self._plans[key]

    def _batch_spec(self, path: Any, x: Any) -> P:
        """Over the workers; over fast axes too, if it lies so already."""
        axes, shape = self._setup.workers.axes, np.shape(x)
        parts = axes.workers * self._setup.accumulation
        if not shape or not shape[0] or shape[0] % parts:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {shape}, but its first axis must be "
                f"a multiple of {parts} = {axes.workers} workers x accumulation."
            )
        known: Any = getattr(getattr(x, "sharding", None), "spec", None)
        # What workers share out alone lies in one way, and is one program.
        split = self._setup.workers.split and known
        first = names_in(known[0])[: len(axes.slow_names)] if split else ()
        return known if split and first == axes.slow_names else P(axes.slow)

    def _program(self, plan: "Plan", placed: Arguments, phase: Phase | None) -> Any:
        """The jitted step."""
        key = plan.kinds, phase
        if key not in self._programs:
            self._programs[key] = _jitted(self._setup, placed, plan.specs, phase)
        return self._programs[key]


class Plan(NamedTuple):
    """How a step's arguments lie on its mesh.

    Attributes:
      specs: their partition specs.
      shardings: their shardings.
      kinds: what decides the program: the structure, shapes, dtypes and specs.
    """

    specs: Arguments
    shardings: Arguments
    kinds: tuple[Any, ...]


def _arguments(
    params: Any, opt_state: Any, batch: Any, rng: Any = None, model_state: Any = None, **others: Any
) -> Arguments:
    return Arguments(params, opt_state, model_state, batch, rng, others)


def _parts(setup: Setup, given: Arguments, phase: Phase | None) -> tuple[Any, Any, Any]:
    """The arguments as a program takes them: what is donated, the state, and the rest.

    What the update leaves of the state as it is belongs to the rest: it is not returned.
    """
    # A phase that a wrapper dropped is noticed where steps may be skipped.
    state, phase = given.opt_state, phase if setup.max_skipped is not None else None
    rest = algorithm.unchanged(state, phase), *given[3:]
    return (given.params, given.model_state), algorithm.changing(state, phase), rest


def _jitted(setup: Setup, placed: Arguments, specs: Arguments, phase: Phase | None) -> Any:
    """The jitted step, once its collectives and the model's state are checked."""
    workers = setup.workers

    def step(donated: Any, opt_state: Any, others: Any) -> Results:
        params, model_state = donated
        kept, *others = others
        opt_state = algorithm.with_unchanged(opt_state, kept, phase)
        given = Arguments(params, opt_state, model_state, *others)
        results = (split_step if workers.split else whole_step)(setup, given, phase)
        _, state, _ = _parts(setup, given._replace(opt_state=results.opt_state), phase)
        return results._replace(opt_state=state)

    in_specs = _parts(setup, specs, phase)
    out_specs = Results(specs.params, in_specs[1], specs.model_state, P(), P(), P())
    mapped = step if workers.split else over_workers(step, workers.axes.mesh, in_specs, out_specs)
    inputs = workers.shardings(in_specs)
    outputs = Results(*map(workers.shardings, out_specs))
    on_cpus = workers.devices.devices.flat[0].platform == "cpu"
    # New residuals are written beside the old ones, until it is known that the step counts. If the
    # old ones were donated, XLA for CPUs would put the new ones among its temporaries, memory that
    # the system gives anew in each step.
    donated = 0 if on_cpus else (0, 1)
    program = jax.jit(mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=donated)
    arguments = _parts(setup, placed, phase)
    if isinstance(workers.axes.mesh, AbstractMesh):
        traced = traced_on_mesh(step, workers.axes.mesh, in_specs, out_specs, arguments)
    else:
        traced = program.trace(*arguments)
    varies = axes_of_results(traced.jaxpr.jaxpr)
    state: Any = jax.tree.unflatten(jax.tree.structure(traced.out_info), varies).model_state
    mend = "Keep it as a float, which is averaged, or make it the same by jax.lax.psum or pmax."
    refuse_differing(named_leaves(state, "model_state"), mend)
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
    max_skipped: int | None = 10,
) -> TrainStep:
    r"""Builds a training step in which every device of a mesh is a worker.

    Each worker computes the gradient of its own share of the batch and passes it to the optimizer;
    nothing is averaged before it. The objective is the mean of the workers' losses.

    Args:
      loss_fn: ``loss_fn(params, batch)`` returns a scalar, the mean over its batch, or this scalar
        and a dict of scalar metrics. Where examples count unequally, as where the loss is a mean
        over tokens that are not padding, it returns in place of the scalar
        ``onebit_jax.WeightedLoss(total, weight)``, a sum and its weight, such as the number of
        tokens: then all tokens of the batch weigh the same, however they lie on workers and
        microbatches, some of which may have none. If the step is called with a random key or a
        model's state,
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
      max_grad_norm: multiplies all workers' gradients by one factor before the optimizer sees them,
        so that the root of their mean squared norm is at most this (one more float32 in the
        exchange); None for no clipping.
      max_skipped: the number of skipped steps in a row after which a call raises. All workers skip
        a step if one worker's loss, gradient or new model state is not finite, or its gradient so
        large that sums of its squares may overflow float32. Parameters, states and random keys stay
        as they were, bit for bit. This library's optimizers know it from the scales that they send;
        of others the gradients are looked at. Each worker sends 4 bytes besides the exchange. None
        turns the check off: one worker's NaN then stays in all parameters and residuals.

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
      - any argument of the optimizer's ``update``, the same on all workers, such as ``value`` for
        :func:`optax.contrib.reduce_on_plateau`: the loss of an earlier step costs no waiting.

      ``metrics`` are scalars on all workers:

      - ``loss`` and the metrics that ``loss_fn`` returned: means over the workers;
      - ``grad_norm``, if gradients are clipped: the root of the workers' mean squared gradient
        norm,
        before clipping;
      - ``phase`` of the update, by its place in "warmup", "compression", "local", "sync" and
        "refresh"; -1 if it was refused, or skipped before any was made; 0 for an optimizer without
        phases;
      - ``skipped``, the number of skipped steps of this run, and ``skipped_in_a_row``, unless
        ``max_skipped`` is None;
      - further metrics of the optimizer's state, such as ``frozen_at``. If several optimizers
        in one ``optax.partition`` report the same metric, labels distinguish: ``matrices/phase``.

      Each phase of an optimizer is compiled separately, at the first call that needs it. A call
      reads the next phase from the result of the update before the last, and so waits for that
      update: at most two updates run at a time. At a change of phase, and while
      :func:`onebit_jax.variance_stable` may end the warm-up at any update, it waits for the last
      one. Optimizers that are in different phases use a program that contains all phases.

      A call with the state that the last call returned continues its run; any other state begins a
      run. After an error for skipped steps the same state may be passed again, with good batches.
      No call checks the steps after it: ``step.skips.check(params, max_skipped)`` after the last
      call waits for that call and raises if the last ``max_skipped`` steps were skipped.

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
      ValueError: for ``accumulation``, ``max_grad_norm`` or ``max_skipped`` outside their range,
        and a ``tx`` or ``mesh`` of the wrong type. From the step, before anything is compiled: for
        a batch that does not divide into workers and microbatches; a state that does not fit the
        optimizer, these parameters and this mesh, lacks :class:`~onebit_jax.PerWorker` nodes, or
        was saved by a :func:`onebit_jax.local_steps` with another schedule; parameters that are
        split between devices; updates that would differ between workers, with the parameter's name;
        a collective under a condition that may differ between workers, which would then wait for
        each other for ever; processes with different steps; ``jax_disable_jit``. For a wrong
        ``phase`` in an earlier call; and from this library's optimizers, for an axis that is not in
        the mesh, or a mesh axis that they would not average over.

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
    workers = Workers(tx, mesh, axis_name, param_specs)
    if max_grad_norm is not None:
        max_grad_norm = validation.number("max_grad_norm", max_grad_norm, "positive")
    if max_skipped is not None:
        max_skipped = validation.count("max_skipped", max_skipped, 1, "or None for no check")
    accumulation = validation.count("accumulation", accumulation, 1, "the number of microbatches")
    return TrainStep(Setup(loss_fn, workers, accumulation, max_grad_norm, max_skipped))
