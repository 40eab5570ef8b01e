"""What is timed: trainings of our programs, and the same models in PyTorch."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.bert import weights
from train.config import RunConfig
from train.glue.__main__ import make_task as glue_task
from train.glue.config import Config as GlueConfig
from train.glue.tasks import TASKS
from train.lm.config import Config as LanguageModelConfig
from train.lm.model import LMConfig
from train.lm.pretrain import make_task as lm_task
from train.resnet.__main__ import make_task as resnet_task
from train.resnet.config import Config as ImagesConfig
from train.resnet.model import ResNetConfig
from train.training import Task


class Timed(NamedTuple):
    """One of the models.

    Attributes:
      config: of our program.
      task: our program's.
      in_torch: makes the same model in PyTorch.
    """

    config: RunConfig
    task: Task
    in_torch: Callable[[], Any]


def _in_torch(module: str, *shape: Any) -> Callable[[], Any]:
    # Only then: PyTorch need not be installed.
    return lambda: importlib.import_module(f"benchmarks.torch_step.{module}").Model(*shape)


def _lm(size: str, options: Any, steps: int) -> Timed:
    batch_size = options.batch_size or LanguageModelConfig.batch_size
    config = LanguageModelConfig(
        size=size,  # pyright: ignore[reportArgumentType]: one of them, as in MODELS
        workers=1,
        batch_size=batch_size,
        warmup=1,
        steps=max(LanguageModelConfig.steps, steps),
    )
    shape = LMConfig.of_size(size)
    return Timed(config, lm_task(config), _in_torch("lm", shape, config.sequence_length))


def _bert(options: Any, steps: int) -> Timed:
    config = GlueConfig(
        workers=1,
        batch_size=options.batch_size or GlueConfig.batch_size,
        dropout=options.dropout,
        data=options.glue,
    )
    config.check()
    [config] = config.runs()
    config = dataclasses.replace(config, warmup=1, steps=max(config.steps, steps))
    [name] = config.tasks
    shape = config.model(weights.load(config.weights))
    return Timed(config, glue_task(config), _in_torch("bert", shape, len(TASKS[name].classes)))


def _resnet(options: Any, steps: int) -> Timed:
    config = ImagesConfig(
        workers=1,
        batch_size=options.batch_size or ImagesConfig.batch_size,
        warmup=1,
        steps=max(ImagesConfig.steps, steps),
        data=options.cifar10,
    )
    config.check()
    shape = ResNetConfig.of_size(config.size)
    return Timed(config, resnet_task(config), _in_torch("resnet", shape))


# From the options of `__main__`, and how many steps will be made: beyond a training's last one the
# learning rate would be 0.
MODELS: Mapping[str, Callable[[Any, int], Timed]] = {
    "lm-nano": lambda options, steps: _lm("nano", options, steps),
    "lm-micro": lambda options, steps: _lm("micro", options, steps),
    "bert": _bert,
    "resnet-20": _resnet,
}
