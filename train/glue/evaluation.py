"""A model's predictions on all examples of a task, and the task's own metrics of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.glue.tasks import GlueTask


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
        batches: from `data.evaluation_batches`.

    Returns:
        `metrics` in percent, by name and, where there are several parts, by part: `{"f1": 90.0}`,
        or `{"accuracy, dev_matched": 80.0, ...}`; and `heldout_examples`.
    """
    outputs, labels, of_part = [], [], []
    for batch in batches:
        made = apply(params, batch)
        columns = (made, batch["labels"], batch["part"])
        made, label, part = (multihost_utils.process_allgather(x, tiled=True) for x in columns)
        outputs.append(made)
        labels.append(label)
        of_part.append(part)
    predictions = np.concatenate(outputs)
    predictions = predictions.argmax(-1) if task.classes else predictions[:, 0]
    label, part = np.concatenate(labels), np.concatenate(of_part)
    found = {}
    for number, name in enumerate(parts):
        chosen = part == number
        for metric, f in task.metrics.items():
            title = metric if len(parts) == 1 else f"{metric}, {name.removesuffix('.tsv')}"
            found[title] = 100 * f(label[chosen], predictions[chosen])
    return {"metrics": found, "heldout_examples": int(np.sum(part >= 0))}
