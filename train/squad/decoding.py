"""From logits to answers: the best spans of each question over all its windows."""

from collections.abc import Sequence

import numpy as np

from train.squad.data import Question, Window


def answers(
    questions: Sequence[Question],
    found: Sequence[Window],
    logits: np.ndarray,
    *,
    best: int = 20,
    longest: int = 30,
) -> dict[str, str]:
    """The text of each question's best span, by its id.

    A span's score is the sum of its ends' logits; it lies in the context, ends where or after it
    begins, and has at most `longest` tokens.

    Args:
        questions: from `read_questions`.
        found: their windows.
        logits: of beginnings and ends in each window, float32 `[windows, S, 2]`.
        best: how many of the best beginnings, and of the best ends, of a window are combined.
        longest: tokens of an answer, at most.

    Returns:
        The text as it stands in the context; empty if no span is possible.
    """
    scores = dict.fromkeys(range(len(questions)), -np.inf)
    texts = dict.fromkeys(range(len(questions)), "")
    for window, of_window in zip(found, logits, strict=True):
        inside = of_window[window.context_at : window.context_at + len(window.context)]
        starts, ends = (np.argsort(-inside[:, i], kind="stable")[:best] for i in range(2))
        lengths = ends[None] - starts[:, None] + 1
        sums = inside[starts, 0][:, None] + inside[ends, 1][None]
        sums = np.where((lengths >= 1) & (lengths <= longest), sums, -np.inf)
        i, j = np.unravel_index(np.argmax(sums), sums.shape)
        if sums[i, j] > scores[window.number]:
            scores[window.number] = sums[i, j]
            first, last = window.offsets[starts[i], 0], window.offsets[ends[j], 1]
            texts[window.number] = questions[window.number].context[first:last]
    return {question.name: texts[number] for number, question in enumerate(questions)}
