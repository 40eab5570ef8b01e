"""Training with one optimizer, from its latest checkpoint to the held-out loss at its end."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from train.bert import data
from train.bert.checkpoint import Checkpoints, abstract
from train.bert.config import Config
from train.bert.metrics import MetricsLog
from train.bert.model import BertConfig, Losses, decay_mask, init_params, pretraining_loss
from train.bert.stop import Stopped, StopRequest
from train.optimizers import OPTIMIZERS, Setting

AXIS = "data"


class Task(NamedTuple):
    """What all optimizers of a comparison share."""

    mesh: Mesh
    model: BertConfig
    corpus: data.TokenizedCorpus
    heldout: data.TokenizedCorpus


def make_optimizer(name: str, config: Config) -> optax.GradientTransformation:
    """The optimizer that `name` stands for.

    Raises:
        ValueError: a hyperparameter is out of range.
    """
    warmup = config.warmup
    if warmup == "auto":
        warmup = onebit_jax.variance_stable(min_steps=config.schedule_warmup)
    setting = Setting(
        learning_rate=config.learning_rate_schedule(),
        axis_name=AXIS,
        steps=config.steps,
        warmup=warmup,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return OPTIMIZERS[name].make(setting)


def train(name: str, config: Config, task: Task, stop: StopRequest) -> None:
    """Trains to the last step, unless that was done before, and writes `result.json`.

    Raises:
        Stopped: `stop` was requested; the run is saved.
        ValueError: the folder's checkpoint is of another model, or past the last step.
    """
    folder = config.folder / name
    asked = {"steps": config.steps, "eval_batches": config.eval_batches}
    result_path = folder / "result.json"
    if result_path.exists() and asked.items() <= json.loads(result_path.read_text()).items():
        return

    optimizer, static = make_optimizer(name, config), OPTIMIZERS[name].static
    init = jax.jit(
        functools.partial(init_params, task.model, config.seed),
        out_shardings=NamedSharding(task.mesh, P()),
    )
    params = init()
    opt_state = onebit_jax.init(optimizer, params, task.mesh)
    train_step = onebit_jax.train_step(
        pretraining_loss(task.model),
        optimizer,
        task.mesh,
        accumulation=config.accumulation,
        max_grad_norm=config.max_grad_norm,
    )
    batches = data.batches(
        task.corpus,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    shapes = abstract((params, opt_state, next(_heldout_batches(config, task))))

    @functools.cache
    def collectives(phase: str) -> list[wire.Collective]:
        compiled = train_step.lower(*shapes, phase=static[phase]).compile()
        return wire.collectives(compiled, task.mesh)

    def bytes_sent(phase: str) -> int:
        return wire.bytes_sent(collectives(phase))

    synced = jax.jit(lambda state, params: state.synced_parameters(params))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        progress, params, opt_state = checkpoints.restore(params, opt_state, batches)
        if progress.step > config.steps:
            raise ValueError(
                f"--steps {config.steps}: {folder} has made {progress.step} steps already; ask for "
                "as many or more, or give another --out"
            )
        with MetricsLog(name, config, progress, bytes_sent) as log:
            for step in range(progress.step, config.steps):
                done = step + 1
                saving = done == config.steps or done % config.checkpoint_every == 0
                phase = _known_phase(name, config, step, log.progress.frozen_at)
                if saving and phase == "local":
                    # Workers must have the same parameters where a run may go on from.
                    phase = "sync"
                batch = _to_mesh(next(batches), task.mesh)
                params, opt_state, metrics = train_step(
                    params, opt_state, batch, phase=static[phase] if phase else None
                )
                log.dispatched(step, phase, metrics)
                stopping = stop.requested(step)
                if stopping or saving:
                    progress = log.land()
                    log.flush()
                    if OPTIMIZERS[name].local_steps:
                        params = synced(opt_state, params)
                    checkpoints.save(progress, params, opt_state, batches)
                if stopping:
                    raise Stopped(name, done)

    warmup = config.warmup
    if warmup == "auto":
        warmup = config.steps if progress.frozen_at < 0 else progress.frozen_at
    phase_of = OPTIMIZERS[name].phase_of
    phases = list(dict.fromkeys(phase_of(t, warmup, config.steps) for t in range(config.steps)))
    loss_fn = jax.jit(pretraining_loss(task.model, train=False))
    result = asked | {
        **heldout_losses(loss_fn, params, _heldout_batches(config, task)),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "frozen_at": progress.frozen_at,
        "seconds": progress.seconds,
        "bytes_sent": progress.bytes_sent,
        "bytes_a_step": {phase: bytes_sent(phase) for phase in phases},
        "wire": wire.table({phase: collectives(phase) for phase in phases}),
    }
    if jax.process_index() == 0:
        result_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def heldout_losses(
    loss_fn: Callable[[Any, Any], tuple[Any, Losses]],
    params: Any,
    batches: Iterable[Mapping[str, Any]],
) -> dict[str, float]:
    """Mean held-out losses: of a masked token, and of a next-sentence label.

    Args:
        loss_fn: from `pretraining_loss`, without dropout, jitted.
        params: the model's parameters.
        batches: from `data.evaluation_batches`.
    """
    mlm_loss, nsp_loss, masked, count = 0.0, 0.0, 0.0, 0
    for batch in batches:
        _, losses = loss_fn(params, batch)
        weight = float(batch["masked_weights"].sum())
        mlm_loss += weight * float(losses["mlm_loss"])
        nsp_loss += float(losses["nsp_loss"])
        masked += weight
        count += 1
    return {
        "heldout_mlm_loss": mlm_loss / masked,
        "heldout_nsp_loss": nsp_loss / count,
        "heldout_masked_tokens": int(masked),
    }


def _known_phase(name: str, config: Config, step: int, frozen_at: int) -> str | None:
    """The phase of step `step` where the host knows it, None where the device must decide.

    Two programs may round differently, so which one runs must not depend on when metrics arrived
    or where a run was resumed.
    """
    optimizer = OPTIMIZERS[name]
    if config.warmup != "auto":
        return optimizer.phase_of(step, config.warmup, config.steps)
    if not optimizer.warms_up or step < config.schedule_warmup:
        return optimizer.phase_of(step, config.schedule_warmup, config.steps)
    # The log is one step behind: that v froze is sure to be known one step after the first
    # compressed step.
    return "compressed" if 0 <= frozen_at < step else None


def _to_mesh(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    sharding = NamedSharding(mesh, P(AXIS))
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }


def _heldout_batches(config: Config, task: Task) -> Iterator[dict[str, jax.Array]]:
    batches = data.evaluation_batches(
        task.heldout,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        seed=config.seed,
        max_batches=config.eval_batches,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    return (_to_mesh(batch, task.mesh) for batch in batches)
