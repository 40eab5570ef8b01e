"""Runs that learn have no warnings, one for each kind of optimizer; with -s they print figures.

python -m pytest -s -m slow tests/train/test_healthy_runs.py
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import pytest

import onebit_jax
from tests.train.runs import smaller
from train.bert import model as bert_model
from train.bert import pretrain as bert
from train.bert.pretrain import Config as BertConfig
from train.config import AXIS
from train.lm import model as lm_model
from train.lm import pretrain as lm
from train.lm.pretrain import Config as LMConfig
from train.registry import REGISTRY
from train.training import Trainer, to_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, WARMUP = 200, 40
RUN: dict[str, Any] = {
    "steps": STEPS,
    "warmup": WARMUP,
    "schedule_warmup": 10,
    "workers": 4,
    "batch_size": 16,
    "sequence_length": 32,
}


small_bert = smaller(bert_model.SIZES, "tiny", (1, 32, 2, 64), autouse=True)
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
RUNS = [("lm", name) for name in LANGUAGE_MODEL] + [
    ("bert", "onebit_adam_frozen"),
    ("bert", "birder"),
]


@functools.cache
def task_of(name):
    if name == "lm":
        config = LMConfig(**RUN)
        return config, lm.make_task(config)
    config = BertConfig(**RUN, vocab_size=512, dropout=0.0)
    return config, bert.make_task(config)


@pytest.mark.slow
@pytest.mark.parametrize(("task_name", "name"), RUNS)
def test_a_run_that_learns_has_no_warnings(task_name, name):
    config, task = task_of(task_name)
    config = dataclasses.replace(config, learning_rate=REGISTRY[name].learning_rate)
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    trainer = Trainer(name, config, task, mesh)
    step, (params, opt_state, _) = trainer.step, trainer.start(task, config.learning_rate)
    batches, losses = task.batches(), []
    for done in range(1, STEPS + 1):
        params, opt_state, metrics = step(params, opt_state, to_mesh(next(batches), mesh))
        losses.append(float(metrics["loss"]))
        if done in (1, WARMUP + 2, STEPS // 2, STEPS):
            diagnosis = onebit_jax.diagnose(params, opt_state, mesh)
            rounded = {key: float(f"{value:.3g}") for key, value in diagnosis.figures.items()}
            print(f"\n{task_name} {name} {done} {losses[-1]:.3f}", json.dumps(rounded), end="")
            assert diagnosis.warnings == ()
            assert diagnosis.compared
    assert losses[-1] < losses[0] - 0.1
