"""A model's predictions on all examples of a task, and the task's own metrics of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from train.glue.tasks import GlueTask
from train.stream import of_examples


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
