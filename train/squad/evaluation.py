"""From logits to answers, and how good they are, as SQuAD 1.1's official script computes it.

Rajpurkar et al., *SQuAD: 100,000+ Questions for Machine Comprehension of Text*, EMNLP 2016.
"""

import collections
import re
import string
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from train.squad.data import Question, Window

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, English articles and extra white space.

    >>> normalize("The  Answer, (an  example)!")
    'answer example'
    """
    lower = "".join(c for c in answer.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lower).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are the same once normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the prediction's words; 0 if none is shared.

    >>> f1("in the year 1066", "1066")
    0.5
    """
    predicted, expected = (normalize(text).split() for text in (prediction, answer))
    same = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def score(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, each question's the best over its answers.

    A question without a prediction counts as 0.

    Args:
        predictions: by the question's id.
        answers: all that were given to a question, by its id.
    """

    def mean(measure: Callable[[str, str], float]) -> float:
        total = sum(
            max(measure(predictions[name], answer) for answer in given)
            for name, given in answers.items()
            if name in predictions
        )
        return 100 * total / len(answers)

    return {"exact_match": mean(exact_match), "f1": mean(f1)}


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
