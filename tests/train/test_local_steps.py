"""Runs of optimizers with local steps end alike wherever they are saved or stopped."""

import jax
import numpy as np
import pytest

from tests.train.runs import at_step, metrics, saved, sigterm
from train import checkpoint
from train.config import AXIS
from train.launch import Stopped, StopRequest
from train.lm.pretrain import Config, make_task
from train.training import Trainer, to_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_language_model")

STEPS, WORKERS = 24, 2


@pytest.fixture(
    scope="module", params=[pytest.param("zero_one_adam", marks=pytest.mark.slow), "local_steps"]
)
def trainer(request, tmp_path_factory, quick_compilation, small_language_model):
    """One, which compiles once for all its runs; their options, and the task."""
    config = Config(
        optimizers=(request.param,),
        workers=WORKERS,
        batch_size=8,
        sequence_length=16,
        steps=STEPS,
        warmup=2,
        schedule_warmup=2,
        learning_rate=1e-2,
        eval_batches=1,
        out=str(tmp_path_factory.mktemp(request.param)),
    )
    config.check()
    mesh = jax.make_mesh((WORKERS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    task = make_task(config)
    return Trainer(request.param, config, task, mesh), config, task, mesh


@pytest.mark.slow
def test_saved_or_stopped_between_two_syncs_it_ends_bit_identical(trainer):
    made, config, task, _ = trainer
    [name] = config.optimizers
    whole, stopped = config.one("whole"), config.one("stopped", checkpoint_every=5)
    made.run(whole, task, StopRequest())
    phases = [row["phase"] for row in metrics(whole.folder / name)]
    # No gap has ended where two local steps follow one another.
    stop = next(t for t in range(6, STEPS) if phases[t - 1 : t + 1] == ["local", "local"])
    with at_step(stop, sigterm), StopRequest() as request, pytest.raises(Stopped) as ended:
        made.run(stopped, task, request)
    [*_, last] = metrics(stopped.folder / name)
    assert f"after step {last['step']}" in str(ended.value)
    if name == "zero_one_adam":
        assert (last["phase"], last["step"]) == ("sync", phases.index("sync", stop) + 1)
    else:
        assert last["step"] == stop
    made.run(stopped, task, StopRequest())
    assert metrics(stopped.folder / name) == metrics(whole.folder / name)
    assert saved(stopped.folder / name) == saved(whole.folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["zero_one_adam"], indirect=True)
def test_workers_share_parameters_after_a_sync_alone(trainer):
    made, config, task, mesh = trainer
    state, seen = made.start(task, config.learning_rate), {}
    for batch, _ in zip(task.batches(), range(STEPS), strict=False):
        params, opt_state, _ = made.step(*state[:2], to_mesh(batch, mesh))
        state = state._replace(params=checkpoint.met(params, opt_state), opt_state=opt_state)
        copies = [
            [np.asarray(x.addressable_shards[worker].data) for x in jax.tree.leaves(state.params)]
            for worker in range(WORKERS)
        ]
        alike = all(np.array_equal(*pair) for pair in zip(*copies, strict=True))
        seen.setdefault(checkpoint.are_apart(opt_state), set()).add(alike)
    assert seen == {False: {True}, True: {False}}
