"""Runs that learn have no warnings, one for each kind of optimizer; with -s they print figures.

python -m pytest -s -m slow tests/train/test_healthy_runs.py
"""

import functools
import json
from typing import Any

import jax
import pytest

import onebit_jax
from tests.train.runs import smaller
from train.config import AXIS
from train.lm import model as lm_model
from train.lm import pretrain as lm
from train.lm.pretrain import Config as LMConfig
from train.registry import REGISTRY
from train.training import Trainer, to_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, WARMUP = 200, 56
RUN: dict[str, Any] = {
    "steps": STEPS,
    "warmup": WARMUP,
    "schedule_warmup": 10,
    "workers": 4,
    "batch_size": 16,
    "sequence_length": 32,
}


small_language_model = smaller(lm_model.SIZES, "nano", (2, 32, 2, 64), autouse=True)
LANGUAGE_MODEL = (
    "adam",
    "onebit_adam_frozen",
    "onebit_adam",
    "onebit_lamb",
    "zero_one_adam",
    "birder",
    "signum",
    "distributed_lion",
    "ef_signsgd",
    "onebit_muon",
    "local_steps_4",
)


@functools.cache
def task():
    return lm.make_task(LMConfig(**RUN))


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODEL)
def test_a_run_that_learns_has_no_warnings(name):
    config = LMConfig(**RUN, learning_rate=REGISTRY[name].learning_rate)
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    trainer = Trainer(name, config, task(), mesh)
    step, (params, opt_state, _) = trainer.step, trainer.start(task(), config.learning_rate)
    batches, losses = task().batches(), []
    for done in range(1, STEPS + 1):
        params, opt_state, metrics = step(params, opt_state, to_mesh(next(batches), mesh))
        losses.append(float(metrics["loss"]))
        if done in (1, WARMUP + 2, STEPS // 2, STEPS):
            diagnosis = onebit_jax.diagnose(params, opt_state, mesh)
            rounded = {key: float(f"{value:.3g}") for key, value in diagnosis.figures.items()}
            print(f"\n{name} {done} {losses[-1]:.3f}", json.dumps(rounded), end="")
            assert diagnosis.warnings == ()
            assert diagnosis.compared
    assert losses[-1] < losses[0] - 0.1
