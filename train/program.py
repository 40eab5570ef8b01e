"""Pre-trains BERT with optimizers of `train.optimizers`, and compares them.

    python -m train.bert.pretrain                              # the main job, in runs/bert-tiny
    python -m train.bert.pretrain --size mini --corpus TEXTS --vocab-size 8192 --steps 2000
    python -m train.bert.pretrain --optimizer adam signum --learning-rate 3e-4
    python -m train.bert.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import contextlib
import logging
import signal
import sys
from collections.abc import Sequence

import jax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.bert import data
from train.bert.config import Config, check_folder, write_config
from train.bert.model import BertConfig
from train.bert.report import write_report
from train.bert.stop import Stopped, StopRequest
from train.bert.training import AXIS, Task, make_optimizer, train


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    # Orbax reports every step of a save through it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        config = tyro.cli(Config, args=arguments, prog="python -m train.bert.pretrain")
        task = _prepare(config)
        check_folder(config)
        if jax.process_index() == 0:
            write_config(config)
            task.corpus.tokenizer.save_vocab(config.folder)
        multihost_utils.sync_global_devices("the output folder is there")
        with StopRequest() as stop:
            for name in config.optimizer:
                train(name, config, task, stop)
        if jax.process_index() == 0:
            text, picture = write_report(config.folder)
            print(text, picture, sep="\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{stopped}; the same command again goes on from there", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print(
            "interrupted; the same command again goes on from the last checkpoint", file=sys.stderr
        )
        return 128 + signal.SIGINT
    return 0


def _prepare(config: Config) -> Task:
    """Everything that can be wrong with the input is found out here; nothing is written."""
    config.check()
    for name in config.optimizer:
        make_optimizer(name, config)
    mesh = _make_mesh(config)
    corpora = data.load(
        config.corpus, config.heldout, vocab=config.vocab, vocab_size=config.vocab_size
    )
    for part, corpus in zip(("training", "held-out"), corpora, strict=True):
        try:
            data.batches(
                corpus, batch_size=config.batch_size, sequence_length=config.sequence_length
            )
        except ValueError as error:
            raise ValueError(f"{part} text: {error}") from error
    model = BertConfig.of_size(config.size, corpora[0].tokenizer.vocab_size, config.dropout)
    return Task(mesh, model, *corpora)


def _make_mesh(config: Config) -> Mesh:
    """Starts JAX on as many devices as there are workers.

    Raises:
        ValueError: there are fewer.
    """
    if config.coordinator == "auto":
        jax.distributed.initialize()
    elif config.coordinator is not None:
        jax.distributed.initialize(config.coordinator, config.processes, config.process_id)
    if config.coordinator != "auto":
        # A running JAX takes it no more: then the caller has chosen the devices. GPUs ignore it.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.workers // config.processes)
    devices = jax.devices()
    several = jax.process_count() > 1
    if len(devices) < config.workers or (several and len(devices) > config.workers):
        raise ValueError(
            f"--workers {config.workers}: a device each, but the {jax.process_count()} processes "
            f"have {len(devices)} ({devices[0].platform}); take that many"
            if several
            else f"--workers {config.workers}: a device each, but there are {len(devices)} "
            f"({devices[0].platform}); take at most that many, or set JAX_PLATFORMS=cpu to "
            "simulate them"
        )
    return jax.make_mesh(
        (config.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.workers],
    )


if __name__ == "__main__":
    sys.exit(main())
