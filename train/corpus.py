"""A corpus of plain text: documents, each a list of paragraphs, and the part held out of them."""

import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from pydoc_data import topics
from typing import Any

_HELDOUT_SPAN = 8
_HELDOUT_CYCLE = 160
_TEXTS_AT_ONCE = 8192
_BLANK_LINES = re.compile(r"\n\s*\n")
_RULE = re.compile(r"^[ *=~^+|-]+$", re.MULTILINE)


def read_corpus(folder: str | os.PathLike[str] | None) -> list[list[str]]:
    """Reads the documents of a corpus, each a list of paragraphs.

    Args:
        folder: a folder of UTF-8 files `*.txt`, read in the order of their names: a paragraph a
            line, a blank line between documents; each file begins a document. None: the Python
            language reference that every Python carries (`pydoc_data.topics`), a topic a document.

    Raises:
        ValueError: the folder is missing or holds no text, or a file is not UTF-8.
    """
    if folder is None:
        return _embedded_corpus()
    root = pathlib.Path(folder)
    paths = sorted(root.glob("*.txt"))
    documents = [document for path in paths for document in _documents(read_utf8(path))]
    if not documents:
        raise ValueError(
            f"corpus folder {root} has no text in {len(paths)} .txt files: give a folder of UTF-8 "
            ".txt files, a paragraph a line"
        )
    return documents


def split_heldout(documents: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Splits off a twentieth: the last 8 of every 160 paragraphs, counted through all documents.

    Spans rather than documents, so that a corpus of a few long books is held out evenly. What
    remains on either side of a held-out span becomes two documents: no pair reaches across it.

    Args:
        documents: lists of paragraphs.

    Returns:
        The documents to train on and those held out.

    Raises:
        ValueError: there are too few paragraphs to hold one out.
    """
    train: list[list[str]] = []
    heldout: list[list[str]] = []
    numbers = itertools.count()
    for document in documents:
        numbered = zip(document, numbers, strict=False)
        for is_heldout, run in itertools.groupby(numbered, lambda pair: _is_heldout(pair[1])):
            (heldout if is_heldout else train).append([paragraph for paragraph, _ in run])
    if not heldout:
        raise ValueError(
            f"the corpus has {next(numbers)} paragraphs, too few to hold out {_HELDOUT_SPAN} of "
            f"every {_HELDOUT_CYCLE}: give more text, or a held-out folder of its own"
        )
    return train, heldout


def read_texts(
    corpus: str | os.PathLike[str] | None, heldout: str | os.PathLike[str] | None
) -> tuple[list[list[str]], list[list[str]]]:
    """Reads the documents to train on and those held out.

    Args:
        corpus: as for `read_corpus`.
        heldout: a folder of the held-out text; None to hold out a part of the corpus.

    Raises:
        ValueError: a text is missing or unfit, too short to hold a part out, or held out and
            trained on.
    """
    documents = read_corpus(corpus)
    if corpus and heldout and pathlib.Path(corpus).resolve() == pathlib.Path(heldout).resolve():
        raise ValueError(
            f"corpus and heldout are one folder, {corpus}: what is trained on is not held out; "
            "give another folder of held-out text, or none, and a part of the corpus is held out"
        )
    return split_heldout(documents) if heldout is None else (documents, read_corpus(heldout))


def read_utf8(path: pathlib.Path) -> str:
    """Returns the text of a file; a `ValueError` names the file and the first byte not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def _is_heldout(number: int) -> bool:
    return number % _HELDOUT_CYCLE >= _HELDOUT_CYCLE - _HELDOUT_SPAN


def _documents(text: str) -> Iterator[list[str]]:
    for is_text, lines in itertools.groupby(map(str.strip, text.split("\n")), key=bool):
        if is_text:
            yield list(lines)


def _embedded_corpus() -> list[list[str]]:
    """Each paragraph once: topics quote one another, and held-out text must not be trained on."""
    seen: set[str] = set()
    documents = []
    for _, text in sorted(topics.topics.items()):
        document = []
        for paragraph in _BLANK_LINES.split(_RULE.sub("", text)):
            joined = " ".join(paragraph.split())
            if joined and joined not in seen:
                seen.add(joined)
                document.append(joined)
        if document:
            documents.append(document)
    return documents


def encodings(encode_batch: Callable[..., Any], texts: Sequence[str]) -> Iterator[Any]:
    """What a tokenizer makes of texts, so many at once that it fits into memory.

    An encoding holds far more than the ids that are kept of it.
    """
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        part = list(texts[start : start + _TEXTS_AT_ONCE])
        yield from encode_batch(part, add_special_tokens=False)
