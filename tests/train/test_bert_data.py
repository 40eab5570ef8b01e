import itertools
import pathlib

import numpy as np
import pytest

from train.bert import data
from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer
from train.corpus import read_corpus, split_heldout
from train.stream import stream


@pytest.fixture(scope="module")
def corpus(documents, tokenizer):
    return data.tokenize(documents[0], tokenizer)


@pytest.fixture(scope="module")
def heldout(documents, tokenizer):
    return data.tokenize(documents[1], tokenizer)


def numbered_corpus(documents: int, sentences: int, longest: int) -> data.TokenizedCorpus:
    """Every token occurs once, and its id tells where: place `i` of the corpus holds id `i + 5`."""
    lengths = np.random.default_rng(0).integers(1, longest + 1, documents * sentences)
    starts = np.append(0, np.cumsum(lengths))
    words = [f"w{i}" for i in range(starts[-1])]
    return data.TokenizedCorpus(
        tokens=np.arange(5, 5 + starts[-1], dtype=np.int32),
        sentence_starts=starts,
        document_starts=np.arange(documents + 1) * sentences,
        tokenizer=WordPieceTokenizer([*SPECIAL_TOKENS, *words]),
    )


def joined(found) -> dict[str, np.ndarray]:
    found = list(found)
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def take(count: int, corpus, **options) -> dict[str, np.ndarray]:
    return joined(itertools.islice(batches(corpus, **options), count))


def batches(corpus, *, batch_size=8, sequence_length=64):
    return stream(data.examples(corpus, sequence_length), batch_size=batch_size)


def test_tokenize_parts_sentences_and_leaves_out_what_is_empty(tokenizer):
    documents = [
        ["Mr. Lists is not. A tuple, e.g. this? 'No!' It is", "is"],
        ["\u200b"],
        ["a list.", "\u200b"],
    ]
    corpus = data.tokenize(documents, tokenizer)
    sentences = ["mr. lists is not.", "a tuple, e.g. this?", "'no!'", "it is", "is", "a list."]
    expected = tokenizer.encode(sentences)
    np.testing.assert_array_equal(corpus.tokens, np.concatenate(expected))
    np.testing.assert_array_equal(np.diff(corpus.sentence_starts), [len(ids) for ids in expected])
    np.testing.assert_array_equal(corpus.document_starts, [0, 5, 6])


@pytest.mark.parametrize(("length", "longest"), [(8, 300), (33, 40), (64, 3)])
def test_labels_restore_the_text_and_next_sentences_follow(length, longest):
    corpus = numbered_corpus(documents=9, sentences=200, longest=longest)
    document_of_sentence = np.repeat(np.arange(9), 200)
    document_of_id = np.repeat(document_of_sentence, np.diff(corpus.sentence_starts))
    document_of_id = np.append(np.full(5, -1), document_of_id)
    batch = take(20, corpus, sequence_length=length)
    full = 0
    for i, ids in enumerate(batch["input_ids"]):
        used = int(batch["attention_mask"][i].sum())
        masked = batch["masked_weights"][i] == 1
        positions = batch["masked_positions"][i][masked]
        assert masked.sum() == max(1, round(0.15 * used))
        assert not np.any(batch["masked_weights"][i][~masked])
        assert np.all(np.diff(positions) > 0)
        text = ids.copy()
        text[positions] = batch["masked_labels"][i][masked]

        cls, first, second = corpus.tokenizer.cls_id, *np.flatnonzero(text == 3)
        assert (text[0], second) == (cls, used - 1)
        assert not set(positions.tolist()) & {0, int(first), int(second)}
        a, b = text[1:first], text[first + 1 : second]
        assert len(a) >= 1
        assert len(b) >= 1
        np.testing.assert_array_equal(a, a[0] + np.arange(len(a)))
        np.testing.assert_array_equal(b, b[0] + np.arange(len(b)))
        np.testing.assert_array_equal(text[used:], 0)
        np.testing.assert_array_equal(batch["attention_mask"][i], np.arange(length) < used)
        segment = (np.arange(length) > first) & (np.arange(length) < used)
        np.testing.assert_array_equal(batch["token_type_ids"][i], segment)

        a_document, b_document = document_of_id[[a[-1], b[0]]]
        assert np.all(document_of_id[a] == a_document)
        assert np.all(document_of_id[b] == b_document)
        if batch["next_sentence_label"][i] == 0:
            assert b[0] == a[-1] + 1
            assert a_document == b_document
        else:
            assert a_document != b_document
        full += used == length
    assert full > 0.5 * len(batch["input_ids"])


def test_masking_is_80_10_10_and_half_the_pairs_are_next(corpus):
    batch = take(40, corpus, batch_size=32)
    masked = batch["masked_weights"] == 1
    labels = batch["masked_labels"][masked]
    seen = np.take_along_axis(batch["input_ids"], batch["masked_positions"], axis=1)[masked]
    special = [corpus.tokenizer.vocabulary.index(token) for token in SPECIAL_TOKENS]
    assert not np.any(np.isin(labels, special))
    is_mask = seen == corpus.tokenizer.mask_id
    assert not np.any(np.isin(seen[~is_mask], special))

    def assert_share(hits, share):
        assert abs(hits.mean() - share) < 4 * np.sqrt(share * (1 - share) / hits.size)

    # A random token is the original one time in the vocabulary's length.
    same = 0.1 / (corpus.tokenizer.vocab_size - 5)
    assert_share(is_mask, 0.8)
    assert_share(seen == labels, 0.1 + same)
    assert_share(~is_mask & (seen != labels), 0.1 - same)
    assert_share(batch["next_sentence_label"], 0.5)
    assert masked.sum() / batch["attention_mask"].sum() == pytest.approx(0.15, abs=0.01)


# Text and vocabulary.


def write(folder: pathlib.Path, **texts: str) -> pathlib.Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, "utf-8", newline="")
    return folder


def test_files_are_read_in_order_and_blank_lines_part_documents(tmp_path):
    write(tmp_path, b="\n\nfour\r\n \t\r\nfive\r\n", a="one\ntwo \n\n\nthree")
    (tmp_path / "notes.md").write_text("not read")
    assert read_corpus(tmp_path) == [["one", "two"], ["three"], ["four"], ["five"]]


def test_heldout_is_a_twentieth_and_parts_the_documents():
    documents = [[f"{d} {p}" for p in range(400)] for d in range(4)]
    train, heldout = split_heldout(documents)
    assert [len(document) for document in heldout] == [8] * 10
    assert train[0][-1] == "0 151"
    assert heldout[0][0] == "0 152"
    assert heldout[2][0] == "1 72"
    chain = itertools.chain.from_iterable
    assert sorted(chain(train + heldout)) == sorted(chain(documents))
    for document in train + heldout:
        book, first = map(int, document[0].split())
        assert document == [f"{book} {first + i}" for i in range(len(document))]
