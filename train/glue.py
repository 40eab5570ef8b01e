"""Fine-tunes a pretrained BERT on tasks of GLUE with optimizers of `train.registry`.

    python -m train.glue --weights bert-base-uncased --data glue --tasks mrpc cola --seeds 0 1 2
    python -m train.glue --weights W --data GLUE --optimizers adam onebit_adam birder --tasks sst-2
    python -m train.glue --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from scipy import stats
from sklearn import metrics

from train.bert import weights
from train.bert.tokenizer import WordPieceTokenizer, join, shorten
from train.config import names_of
from train.corpus import read_utf8
from train.finetuning import (
    FineTuneConfig,
    FineTuned,
    SequenceClassifier,
    classification_loss,
    identity,
    wording,
)
from train.program import Program
from train.stream import Arrays, Examples, of_examples, sequences
from train.training import Task

Metric = Callable[[np.ndarray, np.ndarray], float]


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share that was predicted right."""
    return float(np.mean(labels == predictions))


def f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """F1 of class 1; 0 where there is neither such a label nor such a prediction."""
    return float(metrics.f1_score(labels, predictions, zero_division=0.0))


def _or_zero(f: Callable[[np.ndarray, np.ndarray], Any]) -> Metric:
    """The same metric; 0 of what is constant, where SciPy and scikit-learn would warn."""

    def metric(labels: np.ndarray, predictions: np.ndarray) -> float:
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        return float(f(labels, predictions))

    return metric


matthews = _or_zero(metrics.matthews_corrcoef)
pearson = _or_zero(lambda x, y: stats.pearsonr(x, y)[0])
spearman = _or_zero(lambda x, y: stats.spearmanr(x, y)[0])


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """A task of GLUE, in the layout of its official files.

    Attributes:
        name: as GLUE spells it, which its folder is called by.
        sentences: the columns of the one or two sentences: their names in the header, or their
            places where there is none.
        label: the label's column, likewise.
        classes: what labels are spelled as, in the order of their numbers; empty for a number to be
            predicted.
        metrics: the task's own, by name; the first is what runs are compared by.
        header: whether the first line names the columns.
        dev_files: the files to judge on.
    """

    name: str
    sentences: tuple[str, ...] | tuple[int, ...]
    label: str | int
    classes: tuple[str, ...]
    metrics: Mapping[str, Metric]
    header: bool = True
    dev_files: tuple[str, ...] = ("dev.tsv",)

    @property
    def outputs(self) -> int:
        """Numbers that a model gives for an example: a logit per class, or the prediction."""
        return len(self.classes) or 1


_ACCURACY: dict[str, Metric] = {"accuracy": accuracy}
_F1: dict[str, Metric] = {"f1": f1, "accuracy": accuracy}
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")

TASKS: dict[str, GlueTask] = {
    task.name.lower(): task
    for task in (
        GlueTask("CoLA", (3,), 1, _BINARY, {"matthews": matthews}, header=False),
        GlueTask("SST-2", ("sentence",), "label", _BINARY, _ACCURACY),
        GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, _F1),
        GlueTask("RTE", _PAIR, "label", _ENTAILMENT, _ACCURACY),
        GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT, _ACCURACY),
        GlueTask("QQP", ("question1", "question2"), "is_duplicate", _BINARY, _F1),
        GlueTask("STS-B", _PAIR, "score", (), {"spearman": spearman, "pearson": pearson}),
        GlueTask(
            "MNLI",
            _PAIR,
            "gold_label",
            ("contradiction", "entailment", "neutral"),
            _ACCURACY,
            dev_files=("dev_matched.tsv", "dev_mismatched.tsv"),
        ),
    )
}


def read_examples(task: GlueTask, path: pathlib.Path) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Reads a file of a task.

    Args:
        task: whose layout the file has.
        path: tab-separated, UTF-8, nothing quoted.

    Returns:
        Each example's one or two sentences; and the labels, int32 class numbers, or float32.

    Raises:
        ValueError: there is no such file, a column is missing from its header, a row has too few
            columns, or a label is none of the task's; the file and its line are named.
    """
    # As text, Python would end a line at a carriage return within a sentence, too.
    lines = read_utf8(path).removeprefix("\ufeff").split("\n")
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if line]
    columns: list[Any] = [*task.sentences, task.label]
    if task.header and rows:
        header = rows.pop(0)[1]
        if missing := [name for name in columns if name not in header]:
            raise ValueError(f"{path}, line 1: {task.name}'s columns {missing} are not in {header}")
        columns = [header.index(name) for name in columns]
    if not rows:
        raise ValueError(f"{path} has no examples")
    sentences, labels = [], []
    for number, row in rows:
        if len(row) <= max(columns):
            raise ValueError(
                f"{path}, line {number}: {len(row)} columns where {task.name} has at least "
                f"{max(columns) + 1}, separated by tabs"
            )
        *texts, label = (row[column] for column in columns)
        sentences.append(tuple(texts))
        labels.append(_number(task, label, f"{path}, line {number}"))
    return sentences, np.array(labels, np.int32 if task.classes else np.float32)


def _number(task: GlueTask, label: str, where: str) -> float:
    if task.classes:
        if label not in task.classes:
            raise ValueError(f"{where}: label {label!r} is none of {', '.join(task.classes)}")
        return task.classes.index(label)
    value = float(label)
    if not 0 <= value <= 5:
        raise ValueError(f"{where}: label {label!r} is no number from 0 to 5")
    return value


class Encoded(NamedTuple):
    """The examples of a file, in its order.

    Attributes:
        firsts: ids of each example's first sentence, int32 `[tokens]`.
        seconds: ids of its second one, or None where the task has single sentences.
        labels: class numbers, int32 `[examples]`, or what is to be predicted, float32.
        tokenizer: what made the ids.
    """

    firsts: list[np.ndarray]
    seconds: list[np.ndarray] | None
    labels: np.ndarray
    tokenizer: WordPieceTokenizer


def load(
    task: GlueTask, folder: pathlib.Path, tokenizer: WordPieceTokenizer
) -> tuple[Encoded, dict[str, Encoded]]:
    """Reads a task's official files.

    Args:
        task: the task.
        folder: the task's.
        tokenizer: of the model.

    Returns:
        The examples to train on, and those to judge on, by the file's name.

    Raises:
        ValueError: a file is missing or unfit.
    """

    def encoded(name: str) -> Encoded:
        sentences, labels = read_examples(task, folder / name)
        columns: list[Any] = [tokenizer.encode(column) for column in zip(*sentences, strict=True)]
        return Encoded(columns[0], columns[1] if len(columns) == 2 else None, labels, tokenizer)

    return encoded("train.tsv"), {name: encoded(name) for name in task.dev_files}


def examples(parts: Sequence[Encoded], sequence_length: int) -> Examples:
    """The examples of all parts, one part after another; the longer sentence cut to fit.

    Args:
        parts: from `load`.
        sequence_length: positions, S.

    Returns:
        Dicts: `input_ids`, `token_type_ids`, `attention_mask`, int32 `[S]`; `labels`; `part`, the
        number of the part, int32; and `example_seed`, uint32.

    Raises:
        ValueError: sequences are too short.
    """
    where = [(part, i) for part, encoded in enumerate(parts) for i in range(len(encoded.labels))]

    def make(index: int, rng: np.random.Generator) -> Arrays:
        del rng
        part, i = where[index]
        firsts, seconds, labels, tokenizer = parts[part]
        texts = shorten(firsts[i], None if seconds is None else seconds[i], sequence_length)
        inputs = join(tokenizer, *texts, sequence_length)
        return inputs | {"labels": labels[i], "part": np.array(part, np.int32)}

    return sequences(make, len(where), sequence_length)


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on tasks of GLUE with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers.

    Attributes:
        data: Folder of GLUE: a folder of official files for each task.
        tasks: Tasks, one after another: cola, sst-2, mrpc, rte, qnli, qqp, sts-b, mnli.
    """

    MODEL: ClassVar[str] = "glue"
    OWN: ClassVar[tuple[str, ...]] = ("seeds", "tasks")

    tasks: Annotated[tuple[str, ...], names_of(TASKS)] = ("mrpc",)

    def runs(self) -> list[Self]:
        """A run for each task and seed, of as many steps as the epochs have.

        Raises:
            ValueError: a task's training examples are missing or unfit.
        """
        found = []
        for name in self.tasks:
            path = task_folder(self.data, name) / "train.tsv"
            examples = len(read_examples(TASKS[name], path)[0])
            found += self.of_seeds(name, examples, tasks=(name,))
        return found


def task_folder(data: str, name: str) -> pathlib.Path:
    """The folder of a task's files: in GLUE's, or that itself."""
    inside = pathlib.Path(data) / TASKS[name].name
    return inside if inside.is_dir() else pathlib.Path(data)


def judge(
    task: GlueTask,
    parts: Sequence[str],
    apply: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Iterable[Any],
) -> dict[str, Any]:
    """The metrics of each part, and how many examples there were.

    Args:
        task: whose metrics.
        parts: the parts' names.
        apply: parameters and a batch to `[B, outputs]`, jitted.
        params: the model's parameters.
        batches: from `train.stream.in_order`.

    Returns:
        `metrics` in percent, by name and, where there are several parts, by part: `{"f1": 90.0}`,
        or `{"accuracy, dev_matched": 80.0, ...}`; and `heldout_examples`.
    """
    outputs, label, part = of_examples(
        batches, lambda batch: (apply(params, batch), batch["labels"], batch["part"])
    )
    predictions = outputs.argmax(-1) if task.classes else outputs[:, 0]
    found = {}
    for number, name in enumerate(parts):
        chosen = part == number
        for metric, f in task.metrics.items():
            title = metric if len(parts) == 1 else f"{metric}, {name.removesuffix('.tsv')}"
            found[title] = 100 * f(label[chosen], predictions[chosen])
    return {"metrics": found, "heldout_examples": len(part)}


def make_task(config: Config) -> Task:
    """The fine-tuning of one task with one seed.

    Raises:
        ValueError: the weights, or a file of the task, are missing or unfit.
    """
    [name] = config.tasks
    task = TASKS[name]
    pretrained = weights.load(config.weights)
    folder = task_folder(config.data, name)
    train, dev = load(task, folder, pretrained.tokenizer)
    model = FineTuned(functools.partial(SequenceClassifier, config.model(pretrained), task.outputs))
    return Task(
        config,
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=classification_loss(model, len(task.classes)),
        examples=examples([train], config.sequence_length),
        heldout=examples(list(dev.values()), config.sequence_length),
        judged_whole=True,
        judge=functools.partial(judge, task, list(dev), jax.jit(model.apply)),
        identity=identity(pretrained, [folder / file for file in ("train.tsv", *dev)]),
    )


WORDING = wording("train.glue", lambda config: TASKS[config["tasks"][0]].name)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
