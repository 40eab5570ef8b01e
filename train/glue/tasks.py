"""The tasks of GLUE: where their columns are, what their labels mean, and their own metrics."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics

Metric = Callable[[np.ndarray, np.ndarray], float]


def accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    """The share that was predicted right."""
    return float(np.mean(labels == predictions))


def f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    """F1 of class 1; 0 where there is neither such a label nor such a prediction."""
    ones = np.sum(labels == 1) + np.sum(predictions == 1)
    return float(metrics.f1_score(labels, predictions)) if ones else 0.0


def matthews(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Matthews' correlation; 0 where all labels or all predictions are one class."""
    if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
        return 0.0
    return float(metrics.matthews_corrcoef(labels, predictions))


def _correlation(f: Callable[[np.ndarray, np.ndarray], tuple[float, float]]) -> Metric:
    def correlation(labels: np.ndarray, predictions: np.ndarray) -> float:
        # A constant correlates with nothing; SciPy would warn and say NaN.
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        return float(f(labels, predictions)[0])

    return correlation


pearson = _correlation(stats.pearsonr)
spearman = _correlation(stats.spearmanr)


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
    if not path.is_file():
        raise ValueError(f"{path} is not there: give the folder of {task.name}'s official files")
    try:
        # As text, Python would end a line at a carriage return within a sentence, too.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if line]
    columns: list[Any] = [*task.sentences, task.label]
    if task.header:
        if not rows:
            raise ValueError(f"{path} is empty; its first line must name the columns")
        columns = _places(task, path, rows.pop(0)[1])
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


def _places(task: GlueTask, path: pathlib.Path, header: Sequence[str]) -> list[int]:
    names = [str(name) for name in (*task.sentences, task.label)]
    if missing := [name for name in names if name not in header]:
        no, given, expected = (", ".join(map(repr, x)) for x in (missing, header, names))
        raise ValueError(
            f"{path}, line 1: no column {no} in {given}; {task.name}'s files name {expected}"
        )
    return [header.index(name) for name in names]


def _number(task: GlueTask, label: str, where: str) -> float:
    if task.classes:
        if label not in task.classes:
            raise ValueError(f"{where}: label {label!r} is none of {', '.join(task.classes)}")
        return task.classes.index(label)
    try:
        value = float(label)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 5:
        raise ValueError(f"{where}: label {label!r} is no number from 0 to 5")
    return value
