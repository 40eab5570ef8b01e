"""Training with one optimizer, from its latest checkpoint to the held-out loss at its end."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.markers import is_per_worker
from onebit_jax.programs.over_workers import mesh_of_arrays
from onebit_jax.transforms.algorithm import Phase
from onebit_jax.transforms.onebit_adam import WARMUP
from train import checkpoint, record
from train.checkpoint import State, abstract
from train.config import AXIS, RunConfig
from train.launch import Stopped, StopRequest
from train.metrics import MetricsLog, announced
from train.models import decay_mask
from train.registry import REGISTRY, Setting
from train.stream import Arrays, Examples, in_order, stream

# Devices, or as many simulated workers.
AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Task:
    """What all optimizers of a comparison share: a model, and what it is trained and judged on.

    Attributes:
        config: the options of the run.
        init: draws the parameters.
        loss_fn: as for `onebit_jax.train_step`, with metrics.
        examples: what it is trained on.
        heldout: what it is judged on.
        judge: what `result.json` says of parameters on `heldout_batches`, as arrays on the mesh; it
            takes a model's state, where there is one, as `model_state`.
        mask: which parameters are decayed.
        judged_whole: whether it is judged on all of `heldout`, in order; else on as many shuffled
            batches as the options say.
        write_files: writes what else belongs into the output folder.
        identity: what else than its options a run must have kept to go on, under names.
        init_model_state: makes what the model changes without gradients; None for nothing.
        param_specs: how parameters are split over the fast axes of the mesh, where it has any.
    """

    config: RunConfig
    init: Callable[[], Any]
    loss_fn: Callable[..., tuple[Any, ...]]
    examples: Examples
    heldout: Examples
    judge: Callable[..., dict[str, Any]]
    mask: Callable[[Any], Any] = decay_mask
    judged_whole: bool = False
    write_files: Callable[[pathlib.Path], object] = lambda folder: None
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)
    init_model_state: Callable[[], Any] = lambda: None
    param_specs: Callable[[Any], Any] | None = None

    def batches(self) -> grain.DatasetIterator[Arrays]:
        """This process's shares of all batches, without end, from the first."""
        return stream(self.examples, **self._shares(), seed=self.config.seed)

    def heldout_batches(self) -> Iterator[Arrays]:
        """This process's shares of the held-out batches."""
        if self.judged_whole:
            return in_order(self.heldout, **self._shares())
        batches = stream(self.heldout, **self._shares(), seed=self.config.seed)
        whole = self.heldout.count // self.config.batch_size
        return itertools.islice(batches, min(self.config.eval_batches, whole))

    def _shares(self) -> dict[str, int]:
        return {
            "batch_size": self.config.batch_size,
            "process_index": jax.process_index(),
            "process_count": jax.process_count(),
        }


def make_optimizer(
    name: str, config: RunConfig, mask: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """The optimizer that `name` stands for.

    Raises:
        ValueError: a hyperparameter is out of range.
    """
    warmup = config.warmup_steps
    if warmup == "auto":
        earliest = max(WARMUP.min_steps, config.schedule_warmup_steps)
        warmup = onebit_jax.variance_stable(min_steps=earliest)
    same = {x: getattr(config, x) for x in ("steps", "b1", "b2", "eps", "weight_decay")}
    setting = Setting(
        learning_rate=config.learning_rate_schedule(),
        axis_name=config.axis_name,
        warmup=warmup,
        mask=mask,
        exchange=config.exchange(),
        **same,
    )
    return REGISTRY[name].make(setting)


class Trainer:
    """One optimizer on a task, compiled once for all runs with it.

    Args:
        name: the optimizer's.
        config: options of the runs; those of one run may have another learning rate.
        task: what is trained, with any seed.
        mesh: with the axes that the options ask for; one without devices simulates its workers.
        any_rate: whether the peak learning rate is a part of the optimizer's state, so that runs
            with another one compile nothing anew. Steps that are not finite are then made.
    """

    def __init__(
        self, name: str, config: RunConfig, task: Task, mesh: AnyMesh, *, any_rate: bool = False
    ):
        self._name, self._task, self._mesh, self._any_rate = name, task, mesh, any_rate
        self._devices = mesh_of_arrays(mesh)
        self._batch_axes, self._slow_axes = config.batch_axes, config.slow_axes
        # The slow axis, where there are fast ones beside it.
        self._axis_name = None if task.param_specs is None else config.axis_name
        self._split: Any = {"axis_name": self._axis_name, "param_specs": task.param_specs}
        self.optimizer = make_optimizer(name, config, task.mask)
        if any_rate:
            self.optimizer = optax.inject_hyperparams(
                lambda peak: make_optimizer(
                    name, dataclasses.replace(config, learning_rate=peak), task.mask
                )
            )(peak=config.learning_rate)
        self._collectives: dict[Phase, list[wire.Collective]] = {}
        self._compiling: Callable[[], object] = lambda: None
        make_step = functools.partial(
            onebit_jax.train_step,
            announced(task.loss_fn, lambda: self._compiling()),
            tx=self.optimizer,
            **self._split,
            accumulation=config.accumulation,
            max_grad_norm=config.max_grad_norm,
            max_skipped=None if any_rate else config.max_skipped,
        )
        self.step = self._counted = make_step(mesh=mesh)
        self._counted_mesh = self._devices
        if isinstance(mesh, AbstractMesh):
            # Simulated workers send nothing: what they would is read from a program for CPUs.
            self._counted_mesh = _mesh_of_cpus(mesh)
            self._counted = make_step(mesh=self._counted_mesh)

    def start(self, task: Task, learning_rate: float) -> State:
        """The state before the first step."""
        replicated = NamedSharding(self._devices, P())
        placed: Any = replicated
        if task.param_specs is not None:
            specs = task.param_specs(jax.eval_shape(task.init))
            placed = jax.tree.map(functools.partial(NamedSharding, self._devices), specs)
        params = jax.jit(task.init, out_shardings=placed)()
        model_state = jax.jit(task.init_model_state, out_shardings=replicated)()
        opt_state = onebit_jax.init(self.optimizer, params, self._mesh, **self._split)
        if self._any_rate:
            opt_state.hyperparams["peak"] = jax.device_put(np.float32(learning_rate), replicated)
        return State(params, opt_state, model_state)

    def run(self, config: RunConfig, task: Task, stop: StopRequest) -> dict[str, Any]:
        """Trains to the last step, unless that was done before, and writes `result.json`.

        Returns:
            What that holds.

        Raises:
            ReplicaDivergenceError: replicas have diverged; the last checkpoint is from before.
            Stopped: `stop` was requested; the run is saved.
            NonFiniteError: too many steps in a row were skipped, counted from this start.
            ValueError: the folder's checkpoint is of another model, or past the last step.
        """
        folder = config.folder / self._name
        asked = {"steps": config.steps, "eval_batches": config.eval_batches}
        written = folder / "result.json"
        earlier = json.loads(written.read_bytes()) if written.exists() else {}
        if asked.items() <= earlier.items():
            return earlier

        state, batches = self.start(task, config.learning_rate), task.batches()
        self._shapes = abstract((*state, next(self._placed(task.batches()))))
        with Checkpoints(folder / "checkpoints", keep_last=checkpoint.KEPT) as checkpoints:
            progress, state = checkpoint.restore(checkpoints, state, batches, self.optimizer)
            if progress.step > config.steps:
                raise ValueError(
                    f"--steps {config.steps}: {folder} has made {progress.step} steps already; ask "
                    "for as many or more, or give another --out"
                )
            with MetricsLog(self._name, config, progress, self._bytes_sent, self._dense) as log:
                self._compiling = log.bar.compiling
                progress, state = self._train(config, state, batches, checkpoints, log, stop)
        state = state._replace(params=checkpoint.shared(*state[:2]))
        own = {"workers": config.worker_count, "made": record.context("flax")}
        result = asked | own | self._result(task, state, progress)
        if jax.process_index() == 0:
            written.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result

    def _train(
        self,
        config: RunConfig,
        state: State,
        batches: grain.DatasetIterator[Arrays],
        checkpoints: Checkpoints,
        log: MetricsLog,
        stop: StopRequest,
    ) -> tuple[checkpoint.Progress, State]:
        """Makes the steps that are left, and saves the run."""
        outside = checkpoint.differ_outside_state(state.opt_state)
        saving = stopping = False
        left = range(log.progress.step, config.steps)
        for step, batch in zip(left, self._placed(batches), strict=False):
            done, last = step + 1, step + 1 == config.steps
            phase = checkpoint.last_phase(state.opt_state) if last else None
            *changed, metrics = self.step(
                *state[:2], batch, phase=phase, model_state=state.model_state
            )
            state = State(*changed)
            if outside:
                state = state._replace(params=checkpoint.met(*state[:2]))
            log.dispatched(step, metrics)
            stopping = stopping or stop.requested(step)
            saving = saving or stopping or last or done % config.checkpoint_every == 0
            # A checkpoint has one worker's parameters: it waits until workers have met.
            save = saving and (last or not outside or not checkpoint.are_apart(state.opt_state))
            due = config.diagnose_every is not None and done % config.diagnose_every == 0
            if save or due:
                progress, others = log.land(), {"model_state": state.model_state}
                found = onebit_jax.diagnose(
                    *state[:2], self._mesh, axis_name=self._axis_name, **others
                )
                log.diagnosed(found)
                log.flush()
            if save:
                where = {"batches": batches.get_state()}
                extra = {"progress": dataclasses.asdict(progress), **where}
                checkpoints.save(done, *state[:2], extra=extra, **others)
                saving = False
            if save and stopping:
                checkpoints.close()
                raise Stopped(self._name, done, stop.signal)
        if not self._any_rate:
            most = min(config.max_skipped, -(-config.steps // 2))
            self.step.skips.check(state.params, most)
        return log.progress, state

    def _result(self, task: Task, state: State, progress: checkpoint.Progress) -> dict[str, Any]:
        """What a finished training has come to."""
        parameters = sum(x.size for x in jax.tree.leaves(state.params))
        own = {} if state.model_state is None else {"model_state": state.model_state}
        return {
            **task.judge(state.params, self._placed(task.heldout_batches()), **own),
            "parameters": parameters,
            "devices": self._mesh.size,
            "state_bytes": self._bytes_of_a_worker(state.opt_state) / parameters,
            "frozen_at": progress.frozen_at,
            "seconds": progress.seconds,
            "bytes_sent": progress.bytes_sent,
            "dense_bytes_a_step": self._dense,
            "steps_by_phase": progress.phases,
            "bytes_a_step": {phase: self._bytes_sent(phase) for phase in progress.phases},
            "wire": wire.table({phase: self.collectives(phase) for phase in progress.phases}),
        }

    def collectives(self, phase: Phase) -> list[wire.Collective]:
        """What a step of a phase sends, read from its program; once a run has begun."""
        if phase not in self._collectives:
            params, opt_state, model_state, batch = self._shapes
            shapes = params, opt_state, batch, model_state
            if self._counted is not self.step:
                shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
            lowered = self._counted.lower(*shapes[:3], model_state=shapes[3], phase=phase)
            self._collectives[phase] = wire.collectives(lowered.compile(), self._counted_mesh)
        return self._collectives[phase]

    @property
    def _dense(self) -> float:
        """What a device sends in a step that averages gradients at full precision."""
        workers = math.prod(self._mesh.shape[name] for name in self._slow_axes)
        parameters = sum(x.size for x in jax.tree.leaves(self._shapes[0]))
        return 8 * (workers - 1) * parameters / self._mesh.size

    def _bytes_sent(self, phase: Phase) -> int:
        """What a device sends to other workers in a step of a phase."""
        slow = set(self._slow_axes)
        collectives = self.collectives(phase)
        return wire.bytes_sent(x for x in collectives if slow & set(x.axis.split(",")))

    def _bytes_of_a_worker(self, opt_state: Any) -> float:
        """What an optimizer's state takes of a device's memory, where workers are devices."""

        def held(node: Any) -> float:
            sizes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(node))
            simulated = isinstance(self._mesh, AbstractMesh) and is_per_worker(node)
            return sizes / self._mesh.size if simulated else sizes

        return sum(held(node) for node in jax.tree.leaves(opt_state, is_leaf=is_per_worker))

    def _placed(self, batches: Iterator[Arrays]) -> Iterator[dict[str, jax.Array]]:
        return (to_mesh(batch, self._devices, self._batch_axes) for batch in batches)


def _mesh_of_cpus(mesh: AbstractMesh) -> Mesh:
    """The same mesh, of the host's simulated devices.

    Raises:
        ValueError: there are fewer.
    """
    cpus = jax.devices("cpu")
    if len(cpus) < mesh.size:
        raise ValueError(
            f"what {mesh.size} workers send is counted in a program for as many CPU devices, but "
            f"there are {len(cpus)}: set jax_num_cpu_devices={mesh.size} before JAX starts"
        )
    return jax.make_mesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, devices=cpus[: mesh.size]
    )


def to_mesh(
    batch: Mapping[str, np.ndarray], mesh: Mesh, axes: tuple[str, ...] = (AXIS,)
) -> dict[str, jax.Array]:
    """This process's share of a batch, as a part of arrays that are split over axes of the mesh."""
    sharding = NamedSharding(mesh, P(axes))
    place = functools.partial(jax.make_array_from_process_local_data, sharding)
    return {name: place(array) for name, array in batch.items()}
