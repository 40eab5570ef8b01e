"""Training with one optimizer, from its latest checkpoint to the held-out loss at its end."""

import functools
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from train.bert import data
from train.bert.checkpoint import Checkpoints, abstract
from train.bert.config import Config, Optimizer
from train.bert.metrics import MetricsLog, Phase, phase_of
from train.bert.model import BertConfig, decay_mask, init_params, pretraining_loss
from train.bert.stop import Stopped, StopRequest

AXIS = "data"
_STATIC: dict[Phase, Literal["warmup", "compression"]] = {
    "dense": "warmup",
    "compressed": "compression",
}


class Task(NamedTuple):
    """What all optimizers of a comparison share."""

    mesh: Mesh
    model: BertConfig
    corpus: data.TokenizedCorpus
    heldout: data.TokenizedCorpus


def make_optimizer(name: Optimizer, config: Config) -> optax.GradientTransformation:
    """The optimizer that `name` stands for; until 1-bit Adam compresses, both are AdamW.

    Raises:
        ValueError: a hyperparameter is out of range.
    """
    adamw = {
        "learning_rate": config.learning_rate_schedule(),
        "b1": config.b1,
        "b2": config.b2,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "mask": decay_mask,
    }
    if name == "adam":
        return optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(**adamw))
    warmup = config.warmup
    if warmup == "auto":
        warmup = onebit_jax.variance_stable(min_steps=config.schedule_warmup)
    return onebit_jax.onebit_adam(**adamw, warmup=warmup, axis_name=AXIS, bias_correction=True)


def train(name: Optimizer, config: Config, task: Task, stop: StopRequest) -> None:
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

    optimizer = make_optimizer(name, config)
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
    def collectives(phase: Phase) -> list[wire.Collective]:
        compiled = train_step.lower(*shapes, phase=_STATIC[phase]).compile()
        return wire.collectives(compiled, task.mesh)

    def bytes_sent(phase: Phase) -> int:
        return wire.bytes_sent(collectives(phase))

    with Checkpoints(folder / "checkpoints") as checkpoints:
        progress, params, opt_state = checkpoints.restore(params, opt_state, batches)
        if progress.step > config.steps:
            raise ValueError(
                f"--steps {config.steps}: {folder} has made {progress.step} steps already; ask for "
                "as many or more, or give another --out"
            )
        with MetricsLog(name, config, progress, bytes_sent) as log:
            for step in range(progress.step, config.steps):
                phase = _static_phase(name, config, step, log.progress.frozen_at)
                batch = _to_mesh(next(batches), task.mesh)
                params, opt_state, metrics = train_step(params, opt_state, batch, phase=phase)
                log.dispatched(step, metrics)
                done = step + 1
                stopping = stop.requested(step)
                if stopping or done == config.steps or done % config.checkpoint_every == 0:
                    progress = log.land()
                    log.flush()
                    checkpoints.save(progress, params, opt_state, batches)
                if stopping:
                    raise Stopped(name, done)

    phases: list[Phase] = ["dense"]
    if phase_of(config.steps - 1, progress.frozen_at) == "compressed":
        phases.append("compressed")
    result = asked | {
        **evaluate(params, config, task),
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "frozen_at": progress.frozen_at,
        "seconds": progress.seconds,
        "bytes_sent": progress.bytes_sent,
        "bytes_a_step": {phase: bytes_sent(phase) for phase in phases},
        "wire": wire.table({phase: collectives(phase) for phase in phases}),
    }
    if jax.process_index() == 0:
        result_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def evaluate(params: Any, config: Config, task: Task) -> dict[str, float]:
    """Mean held-out losses, without dropout: of a masked token, and of a next-sentence label."""
    loss_fn = jax.jit(pretraining_loss(task.model, train=False))
    mlm_loss, nsp_loss, masked, batches = 0.0, 0.0, 0.0, 0
    for batch in _heldout_batches(config, task):
        _, losses = loss_fn(params, batch)
        weight = float(batch["masked_weights"].sum())
        mlm_loss += weight * float(losses["mlm_loss"])
        nsp_loss += float(losses["nsp_loss"])
        masked += weight
        batches += 1
    return {
        "heldout_mlm_loss": mlm_loss / masked,
        "heldout_nsp_loss": nsp_loss / batches,
        "heldout_masked_tokens": int(masked),
    }


def _static_phase(
    name: Optimizer, config: Config, step: int, frozen_at: int
) -> Literal["warmup", "compression"] | None:
    """The phase of step `step` where the host knows it, None where the device must decide.

    Two programs may round differently, so which one runs must not depend on when metrics arrived
    or where a run was resumed.
    """
    if name == "adam":
        return _STATIC["dense"]
    if config.warmup != "auto":
        return _STATIC[phase_of(step, config.warmup)]
    if step < config.schedule_warmup:
        return _STATIC["dense"]
    # The log is one step behind: that v froze is sure to be known one step after the first
    # compressed step.
    return _STATIC["compressed"] if 0 <= frozen_at < step else None


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
