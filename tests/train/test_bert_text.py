import itertools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer, load_tokenizer, train_tokenizer
from train.corpus import read_corpus, split_heldout

ROOT = pathlib.Path(__file__).resolve().parents[2]


def write(folder: pathlib.Path, **texts: str) -> pathlib.Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, "utf-8", newline="")
    return folder


# ---------------------------------------------------------------------------------------- corpus


def test_files_are_read_in_order_and_blank_lines_part_documents(tmp_path):
    write(tmp_path, b="\n\nfour\r\n \t\r\nfive\r\n", a="one\ntwo \n\n\nthree")
    (tmp_path / "notes.md").write_text("not read")
    assert read_corpus(tmp_path) == [["one", "two"], ["three"], ["four"], ["five"]]


def test_missing_folder(tmp_path):
    with pytest.raises(ValueError, match=r"corpus folder .*nowhere does not exist"):
        read_corpus(tmp_path / "nowhere")


def test_folder_without_text_files(tmp_path):
    (tmp_path / "corpus.csv").write_text("text")
    with pytest.raises(ValueError, match=r"has no \.txt files: give a folder"):
        read_corpus(tmp_path)


def test_folder_of_empty_files(tmp_path):
    with pytest.raises(ValueError, match=r"all 2 \.txt files are empty"):
        read_corpus(write(tmp_path, a="", b="\n \n"))


def test_file_that_is_not_utf8_is_named_with_the_offset(tmp_path):
    write(tmp_path, a="fine")
    (tmp_path / "b.txt").write_bytes("é".encode() + "café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8: byte 0xe9 at offset 5"):
        read_corpus(tmp_path)


def test_embedded_corpus_has_each_paragraph_once_and_on_one_line():
    documents = read_corpus(None)
    paragraphs = [paragraph for document in documents for paragraph in document]
    assert len(documents) > 50
    assert sum(map(len, paragraphs)) > 250_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any("\n" in paragraph for paragraph in paragraphs)
    assert not any(set(paragraph) <= set("*=-+|~^ ") for paragraph in paragraphs)
    assert documents == read_corpus(None)


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


def test_too_little_text_to_hold_out():
    with pytest.raises(ValueError, match="the corpus has 152 paragraphs, too few to hold out 8"):
        split_heldout([["paragraph"] * 76] * 2)


# ------------------------------------------------------------------------------------- tokenizer


def test_saved_vocabulary_gives_the_trained_tokenizer(tmp_path, tokenizer, documents):
    path = tokenizer.save_vocab(tmp_path)
    assert path == tmp_path / "vocab.txt"
    loaded = load_tokenizer(path)
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.vocabulary[:5] == SPECIAL_TOKENS
    assert loaded.vocab_size == 1024
    for left, right in zip(
        loaded.encode(documents[1][0]), tokenizer.encode(documents[1][0]), strict=True
    ):
        np.testing.assert_array_equal(left, right)


def test_training_gives_the_same_vocabulary_in_every_process():
    # Few words and many ties: the trainer alone differs here from one process to the next.
    program = (
        "from train.corpus import read_corpus\n"
        "from train.bert.tokenizer import train_tokenizer\n"
        "print(train_tokenizer(read_corpus(None)[:8], 2000).vocabulary)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert len({run.stdout for run in runs}) == 1
    assert "[MASK]" in runs[0].stdout


def test_trained_alphabet_keeps_the_commonest_characters():
    rare = "".join(chr(0x4E00 + i) for i in range(1500))
    tokenizer = train_tokenizer([["aaa bbb", rare]], 2000)
    assert {"a", "##a", "b", "##b", chr(0x4E00)} <= set(tokenizer.vocabulary)
    assert chr(0x4E00 + 1499) not in tokenizer.vocabulary


def test_encoding_lowers_strips_accents_and_continues_words():
    tokenizer = WordPieceTokenizer([*SPECIAL_TOKENS, "cafe", "##s", "!", "[", "]", "mask"])
    text = tokenizer.encode(["Cafés! [MASK] 東"])[0]
    assert text.dtype == np.int32
    tokens = [tokenizer.vocabulary[i] for i in text]
    assert tokens == ["cafe", "##s", "!", "[", "mask", "]", "[UNK]"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[CLS]\n[SEP]\nthe\n", r"v\.txt: no \[UNK\], \[MASK\]: BERT needs \[PAD\]"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na\n", r"v\.txt: token 'a' occurs 2 times"),
        (b"[PAD]\n\xff", r"v\.txt is not UTF-8: byte 0xff at offset 6"),
        (None, r"v\.txt is not a file"),
    ],
)
def test_bad_vocabulary(tmp_path, content, message):
    path = tmp_path / "v.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_vocabulary_size_below_the_characters():
    with pytest.raises(ValueError, match="vocab_size is 6; this corpus needs at least 9"):
        train_tokenizer([["ab"]], 6)
