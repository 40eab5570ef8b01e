"""Training with one optimizer, from its latest checkpoint to the held-out loss at its end."""

import contextlib
import functools
import json
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.training.phase_choice import progress_of
from onebit_jax.transforms.phases import Phase
from train import checkpoint
from train.checkpoint import Progress, State, abstract
from train.config import RunConfig
from train.metrics import MetricsLog
from train.optimizers import OPTIMIZERS, Setting, warmup_end
from train.profiling import Profiler
from train.progress import announced
from train.stop import GaveUp, Stopped, StopRequest
from train.stream import Arrays

AXIS = "data"


class Task(NamedTuple):
    """What all optimizers of a comparison share: a model, and what it is trained and judged on.

    Attributes:
        init: draws the parameters.
        loss_fn: as for `onebit_jax.train_step`, with metrics.
        mask: which parameters are decayed.
        batches: this process's shares of all batches, without end, from the first.
        heldout_batches: this process's shares of the held-out batches.
        judge: what `result.json` says of parameters on these, as arrays on the mesh; it takes a
            model's state, where there is one, as `model_state`.
        write_files: writes what else belongs into the output folder.
        identity: what else than its options a run must have kept to go on, under names.
        init_model_state: makes what the model changes without gradients; None for nothing.
    """

    init: Callable[[], Any]
    loss_fn: Callable[..., tuple[Any, ...]]
    mask: Callable[[Any], Any]
    batches: Callable[[], grain.DatasetIterator[Arrays]]
    heldout_batches: Callable[[], Iterator[Arrays]]
    judge: Callable[..., dict[str, Any]]
    write_files: Callable[[pathlib.Path], object] = lambda folder: None
    identity: Mapping[str, str] = types.MappingProxyType({})
    init_model_state: Callable[[], Any] = lambda: None


def make_optimizer(
    name: str, config: RunConfig, mask: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """The optimizer that `name` stands for.

    Raises:
        ValueError: a hyperparameter is out of range.
    """
    setting = Setting(
        learning_rate=config.learning_rate_schedule(),
        axis_name=AXIS,
        steps=config.steps,
        warmup=warmup_end(config.warmup, config.schedule_warmup),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=mask,
    )
    return OPTIMIZERS[name].make(setting)


def train(name: str, config: RunConfig, task: Task, mesh: Mesh, stop: StopRequest) -> None:
    """Trains to the last step, unless that was done before, and writes `result.json`.

    Raises:
        ReplicaDivergenceError: replicas have diverged; the last checkpoint is from before.
        Stopped: `stop` was requested; the run is saved.
        GaveUp: too many steps in a row were left out, or half of all of them at the end.
        ValueError: the folder's checkpoint is of another model, or past the last step.
    """
    folder = config.folder / name
    asked = {"steps": config.steps, "eval_batches": config.eval_batches}
    result_path = folder / "result.json"
    if result_path.exists() and asked.items() <= _read(result_path).items():
        return

    profiler = Profiler(folder / "profile" if config.profile else None)

    def compiling(phase: Phase | None) -> None:
        log.compiling(phase)
        profiler.compiling()

    train_step, state = start(name, config, task, mesh, compiling)
    batches = task.batches()
    shapes = abstract((state.params, state.opt_state, next(_heldout_batches(task, mesh))))
    lower = functools.partial(train_step.lower, *shapes, model_state=abstract(state.model_state))
    phased = bool(progress_of(state.opt_state))

    @functools.cache
    def collectives(phase: Phase) -> list[wire.Collective]:
        return wire.collectives(lower(phase=phase if phased else None).compile(), mesh)

    def bytes_sent(phase: Phase) -> int:
        return wire.bytes_sent(collectives(phase))

    synced = jax.jit(lambda state, params: state.synced_parameters(params))
    with Checkpoints(folder / "checkpoints", keep_last=checkpoint.KEPT) as checkpoints:
        optimizer = make_optimizer(name, config, task.mask)
        progress, state = checkpoint.restore(checkpoints, state, batches, optimizer)
        if progress.step > config.steps:
            raise ValueError(
                f"--steps {config.steps}: {folder} has made {progress.step} steps already; ask for "
                "as many or more, or give another --out"
            )
        first = progress.step
        with profiler, MetricsLog(name, config, progress, bytes_sent) as log:
            for step in range(first, config.steps):
                done = step + 1
                saving = done == config.steps or done % config.checkpoint_every == 0
                batch = to_mesh(next(batches), mesh)
                phase = "sync" if saving and _takes_local_steps(name, config, step) else None
                with _giving_up(name, first):
                    *changed, metrics = train_step(
                        *state[:2], batch, phase=phase, model_state=state.model_state
                    )
                state = State(*changed)
                log.dispatched(step, metrics)
                profiler.dispatched(done, state.params)
                stopping = stop.requested(step)
                due = config.diagnose_every is not None and done % config.diagnose_every == 0
                if stopping or saving or due:
                    progress = log.land()
                    found = onebit_jax.diagnose(*state[:2], mesh, model_state=state.model_state)
                    log.diagnosed(found)
                    log.flush()
                if stopping or saving:
                    if OPTIMIZERS[name].local_steps:
                        state = state._replace(params=synced(state.opt_state, state.params))
                    checkpoint.save(checkpoints, progress, state, batches)
                if stopping:
                    checkpoints.close()
                    raise Stopped(name, done, stop.signal)
    with _giving_up(name, first):
        train_step.skips.check(state.params, min(config.max_skipped, -(-config.steps // 2)))

    phases = _phases(name, config, progress)
    result = asked | {
        **_judged(task, state, mesh),
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "frozen_at": progress.frozen_at,
        "seconds": progress.seconds,
        "bytes_sent": progress.bytes_sent,
        "bytes_a_step": {phase: bytes_sent(phase) for phase in phases},
        "wire": wire.table({phase: collectives(phase) for phase in phases}),
    }
    if jax.process_index() == 0:
        result_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _read(path: pathlib.Path) -> dict[str, Any]:
    """A `result.json`; of one that is damaged nothing, so that it is written anew."""
    try:
        result = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def start(
    name: str,
    config: RunConfig,
    task: Task,
    mesh: Mesh,
    compiling: Callable[[Phase | None], None],
) -> tuple[onebit_jax.TrainStep, State]:
    """The training step, and the state before the first one.

    `compiling` is told for which phase the step is compiled, when it is.
    """
    optimizer = make_optimizer(name, config, task.mask)
    replicated = NamedSharding(mesh, P())
    params = jax.jit(task.init, out_shardings=replicated)()
    model_state = jax.jit(task.init_model_state, out_shardings=replicated)()
    state = State(params, onebit_jax.init(optimizer, params, mesh), model_state)
    loss_fn, optimizer = announced(task.loss_fn, optimizer, compiling)
    train_step = onebit_jax.train_step(
        loss_fn,
        optimizer,
        mesh,
        accumulation=config.accumulation,
        max_grad_norm=config.max_grad_norm,
        max_skipped=config.max_skipped,
    )
    return train_step, state


@contextlib.contextmanager
def _giving_up(name: str, first: int) -> Iterator[None]:
    """Makes of a step's `NonFiniteError` the program's own, with steps counted from `first`."""
    try:
        yield
    except onebit_jax.NonFiniteError as error:
        step = first + error.step
        again = type(error)(step, error.worker, error.tensor, error.in_a_row)
        raise GaveUp(f"{name}: {again}") from error


def _takes_local_steps(name: str, config: RunConfig, step: int) -> bool:
    """Whether step `step` may be local; where a run can go on from, workers must have met."""
    warmup = config.warmup
    return OPTIMIZERS[name].local_steps and warmup != "auto" and step >= warmup


def _phases(name: str, config: RunConfig, progress: Progress) -> list[Phase]:
    """The phases of a finished run, in the order of their first steps."""
    warmup = config.warmup
    if warmup == "auto":
        warmup = config.steps if progress.frozen_at < 0 else progress.frozen_at
    phase_of = OPTIMIZERS[name].phase_of
    return list(dict.fromkeys(phase_of(t, warmup, config.steps) for t in range(config.steps)))


def to_mesh(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's share of a batch, as a part of arrays that are split over the mesh."""
    sharding = NamedSharding(mesh, P(AXIS))
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }


def _judged(task: Task, state: State, mesh: Mesh) -> dict[str, Any]:
    own = {} if state.model_state is None else {"model_state": state.model_state}
    return task.judge(state.params, _heldout_batches(task, mesh), **own)


def _heldout_batches(task: Task, mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    return (to_mesh(batch, mesh) for batch in task.heldout_batches())
