"""Training one task with one optimizer at any learning rate."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from onebit_jax import wire
from onebit_jax.markers import is_per_worker
from onebit_jax.training.phase_choice import progress_of
from onebit_jax.transforms.phases import PHASES, Phase
from train import schedules
from train.bert import pretrain as bert
from train.compare_options import Options
from train.lm import pretrain as lm
from train.optimizers import OPTIMIZERS, Setting, warmup_end
from train.progress import StepBar
from train.sweep import or_none
from train.workers import (
    AXIS,
    OnDevices,
    Workers,
    mean_over_workers,
    replicate,
    shares,
    worker_gradients,
    worker_update,
)


class Task(NamedTuple):
    """What is trained, on what, and how it is judged.

    Attributes:
        params: the parameters that every training begins with.
        workers: who trains.
        gradients: the mean loss and each worker's gradients, from parameters and a batch;
            compiled once for all optimizers.
        batches: the batches of all steps, in shares.
        heldout: the held-out loss of parameters.
        mask: which parameters are decayed.
    """

    params: Any
    workers: Workers
    gradients: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[Any]
    heldout: Callable[[Any], float]
    mask: Callable[[Any], Any]


def make_task(options: Options, workers: Workers, seed: int) -> Task:
    """The task that options ask for, as the pre-training programs have it.

    Raises:
        ValueError: there is no such text, or not enough of it.
    """
    shared: Any = {
        "corpus": options.corpus,
        "heldout": options.heldout,
        "size": options.model_size,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "seed": seed,
        "eval_batches": options.eval_batches,
    }
    if options.task == "bert":
        own: Any = {"vocab_size": options.vocab_size, "dropout": options.dropout}
        task, judged_by = bert.make_task(bert.Config(**shared, **own)), "heldout_mlm_loss"
    else:
        task, judged_by = lm.make_task(lm.Config(**shared)), "heldout_loss"
    stream = itertools.islice(task.batches(), options.steps)
    batches = [shares(batch, options.workers) for batch in stream]
    judged_on = list(task.heldout_batches())
    return Task(
        task.init(),
        workers,
        jax.jit(workers.map(worker_gradients(task.loss_fn, options.max_grad_norm))),
        batches,
        lambda params: task.judge(params, iter(judged_on))[judged_by],
        task.mask,
    )


class Trainer:
    """One optimizer, compiled once for all learning rates.

    Args:
        name: the optimizer.
        options: of its trainings.
        task: what to train, with any seed.
        mesh: one device per worker: what is sent is read from programs compiled for them.
    """

    def __init__(self, name: str, options: Options, task: Task, mesh: Mesh):
        self._name, self._optimizer = name, OPTIMIZERS[name]
        self._options, self._task, self._mesh = options, task, mesh
        warmup = warmup_end(options.warmup, options.schedule_warmup)

        def make(peak: float) -> optax.GradientTransformation:
            rate = schedules.cosine(peak, warmup=options.schedule_warmup, steps=options.steps)
            return self._optimizer.make(
                Setting(
                    learning_rate=rate,
                    axis_name=AXIS,
                    steps=options.steps,
                    warmup=warmup,
                    weight_decay=options.weight_decay,
                    mask=task.mask,
                )
            )

        # The peak is a part of the state, so that another one compiles nothing anew.
        self._tx = optax.inject_hyperparams(make)(peak=0.0)
        self._init = jax.jit(task.workers.map(self._tx.init))
        self._updates: dict[Phase, Any] = {}

    def _update(self, on: Workers, phase: Phase) -> Any:
        worker = worker_update(self._tx, phase)
        return jax.jit(on.map(worker), donate_argnums=(0, 1))

    def phases(self, frozen_at: int | None) -> list[Phase]:
        """The phase of every step of a training.

        Args:
            frozen_at: what its record says: the steps made when the variance froze, -1 if it never
                did, None for an optimizer that freezes none.
        """
        return [self._phase(step, frozen_at) for step in range(self._options.steps)]

    def _phase(self, step: int, frozen_at: int | None) -> Phase:
        warmup, steps = self._options.warmup, self._options.steps
        if frozen_at is not None:
            warmup = frozen_at if frozen_at >= 0 else steps
        return self._optimizer.phase_of(step, steps if warmup == "auto" else warmup, steps)

    def _next_phase(self, step: int, opt_state: Any) -> Phase:
        if self._optimizer.warms_up:
            return PHASES[int(progress_of(opt_state)[0].upcoming[0])]
        return self._phase(step, None)

    def train(self, task: Task, learning_rate: float) -> dict[str, Any]:
        """Makes one training, on the batches of a seed, and returns its record, as JSON holds it.

        Of a task that has more batches than there are steps the first ones are taken.
        """
        phases, steps = [], self._options.steps
        params, opt_state = self._begin(task, learning_rate)
        losses, ends = [], []
        title = f"{self._name}, learning rate {learning_rate:g}"
        with StepBar(title, steps, leave=False) as bar:
            for step, batch in enumerate(task.batches[:steps]):
                phase = self._next_phase(step, opt_state)
                phases.append(phase)
                if phase not in self._updates:
                    bar.compiling(phase)
                    self._updates[phase] = self._update(task.workers, phase)
                loss, grads = task.gradients(params, batch)
                params, opt_state = self._updates[phase](params, opt_state, grads)
                jax.block_until_ready(params)
                losses.append(float(loss))
                ends.append(time.perf_counter())
                bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
                bar.update()
        seconds: dict[Phase, list[float]] = {}
        for phase, before, took in zip(phases[1:], phases, np.diff(ends), strict=False):
            # The first step of a phase compiles it.
            if phase == before:
                seconds.setdefault(phase, []).append(took)
        frozen_at = None
        if self._optimizer.warms_up:
            frozen_at = int(progress_of(opt_state)[0].frozen_at)
        return {
            "learning_rate": learning_rate,
            "frozen_at": frozen_at,
            "heldout": or_none(task.heldout(mean_over_workers(jax.device_get(params)))),
            "losses": list(map(or_none, losses)),
            "seconds": {phase: statistics.median(took) for phase, took in seconds.items()},
            "state_bytes": self._state_bytes(opt_state),
        }

    def _begin(self, task: Task, learning_rate: float) -> tuple[Any, Any]:
        params, on = task.params, task.workers
        opt_state = self._init(params)
        opt_state.hyperparams["peak"] = jax.numpy.float32(learning_rate)
        if self._optimizer.local_steps:
            params = replicate(params, self._options.workers)
        # A copy of the parameters: updates donate their arguments.
        return on.place((jax.tree.map(jax.numpy.copy, params), opt_state))

    def _state_bytes(self, opt_state: Any) -> float:
        """Bytes per parameter that a worker holds."""

        def of_a_worker(node: Any) -> int:
            total = sum(x.nbytes for x in jax.tree.leaves(node))
            return total // self._options.workers if is_per_worker(node) else total

        nodes = jax.tree.leaves(opt_state, is_leaf=is_per_worker)
        parameters = sum(x.size for x in jax.tree.leaves(self._task.params))
        return sum(map(of_a_worker, nodes)) / parameters

    def bytes_sent(self, phases: Sequence[Phase]) -> dict[Phase, int]:
        """What a worker sends in an update of each of these phases."""
        return {phase: self._bytes_of(phase) for phase in dict.fromkeys(phases)}

    def _bytes_of(self, phase: Phase) -> int:
        on = OnDevices(self._mesh)
        params = jax.eval_shape(lambda: self._task.params)
        grads = jax.eval_shape(lambda: replicate(self._task.params, self._options.workers))
        opt_state = jax.eval_shape(on.map(self._tx.init), params)
        lowered = self._update(on, phase).lower(
            grads if self._optimizer.local_steps else params, opt_state, grads
        )
        # What it sends is settled before code is generated, which need not be fast here.
        compiled = lowered.compile({"xla_backend_optimization_level": "0"})
        return wire.bytes_sent(wire.collectives(compiled, self._mesh))
