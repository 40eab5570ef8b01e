"""SQuAD 1.1's own measures, exact match and F1, as its official script computes them.

Rajpurkar et al., *SQuAD: 100,000+ Questions for Machine Comprehension of Text*, EMNLP 2016.
"""

import collections
import re
import string
from collections.abc import Callable, Mapping, Sequence

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
