"""The language model's data: tokenizers, what their tokens stand for, and batches of them."""

import itertools
import shutil

import numpy as np
import pytest

from train.corpus import read_corpus
from train.lm import data
from train.lm.data import FILE, BPETokenizer, ByteTokenizer, load_bpe, train_bpe
from train.lm.pretrain import heldout_losses
from train.stream import stream

PIECES = data.to_pieces(read_corpus(None)[:40])
# Characters of one to four bytes, none of which the corpus need have, and spaces of all kinds.
TEXT = ["Café 漢字 \U0001f600\n", "  two  spaces,\ttabs\n\n", "def f(x): return x\n"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(PIECES, 400)


def test_text_comes_back(bpe):
    tokens = bpe.encode(TEXT)
    assert bpe._tokenizer.decode(tokens.tolist()) == "".join(TEXT)
    assert tokens.dtype == np.uint16
    assert ByteTokenizer().encode(TEXT).tobytes() == "".join(TEXT).encode()


def test_tokens_stand_for_all_bytes_of_the_text(bpe):
    for pieces in (TEXT, PIECES):
        tokens = bpe.encode(pieces)
        assert bpe.token_bytes[tokens].sum() == len("".join(pieces).encode())
        assert len(tokens) < len("".join(pieces).encode())
    assert sorted(bpe.token_bytes)[:256] == [1] * 256


def test_the_same_text_gives_the_same_tokenizer(bpe, tmp_path):
    again = train_bpe(PIECES, 400)
    assert again.digest == bpe.digest
    bpe.save(tmp_path)
    loaded = load_bpe(tmp_path / FILE, 400)
    assert loaded.digest == bpe.digest
    np.testing.assert_array_equal(loaded.encode(TEXT), bpe.encode(TEXT))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_texts_in_either_kind_of_tokens():
    of_bytes = data.load(None, None)
    of_pairs = data.load(None, None, lambda pieces: train_bpe(pieces[:200], 300))
    assert isinstance(of_pairs.tokenizer, BPETokenizer)
    for tokens, text in zip(of_pairs[:2], of_bytes[:2], strict=True):
        assert of_pairs.tokenizer._tokenizer.decode(tokens.tolist()).encode() == text.tobytes()


def test_bits_of_a_byte_do_not_depend_on_how_bytes_are_joined():
    """Two tokens of one byte each at a nat each, or one of both at two nats."""
    targets = np.array([[0, 1], [1, 0]])
    losses = {
        nats: heldout_losses(lambda params, batch, nats=nats: (nats, None), lengths, None, batches)
        for nats, lengths, batches in (
            (1.0, np.array([1, 1]), [{"targets": targets}] * 2),
            (2.0, np.array([2, 2]), [{"targets": targets}]),
        )
    }
    assert losses[1.0]["heldout_bits_per_byte"] == pytest.approx(1 / np.log(2))
    assert losses[2.0]["heldout_bits_per_byte"] == pytest.approx(1 / np.log(2))
    assert (losses[1.0]["heldout_loss"], losses[2.0]["heldout_loss"]) == (1.0, 2.0)
    assert [x["heldout_tokens"] for x in losses.values()] == [8, 4]
    assert [x["heldout_bytes"] for x in losses.values()] == [8, 8]


def test_too_small_a_corpus_or_another_vocabulary(bpe, tmp_path):
    for size in (2**31 - 1, 260):
        with pytest.raises(ValueError, match=rf"vocab_size {size}: .* gives 258 tokens"):
            train_bpe(["aba aba"], size)
    assert len(train_bpe(["aba aba"], 258).token_bytes) == 258
    bpe.save(tmp_path)
    with pytest.raises(ValueError, match="has 400 tokens, not --vocab-size 300; put back"):
        load_bpe(tmp_path / FILE, 300)


# Batches.

BYTES = np.random.default_rng(0).integers(256, size=1001).astype(np.uint8)
PER_EPOCH = 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("Café.\nMore of it.\n\nAnother text.\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("The last one.\n", encoding="utf-8")
    return tmp_path


def test_text_is_the_utf8_of_documents(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("heldout") / "same"
    shutil.copytree(folder, other)
    text, heldout, _ = data.load(folder, other)
    expected = "Café.\nMore of it.\n\nAnother text.\n\nThe last one.\n"
    assert text.tobytes() == heldout.tobytes() == expected.encode()


def test_held_out_text_is_not_trained_on():
    text, heldout = (x.tobytes() for x in data.load(None, None)[:2])
    assert 0.03 < len(heldout) / len(text) < 0.08
    for line in heldout.splitlines()[::20]:
        if len(line) > 60:
            assert line not in text


def test_targets_are_the_inputs_shifted():
    for batch in itertools.islice(stream(data.examples(BYTES, 50), batch_size=4), 3):
        found = {name: (x.shape, x.dtype) for name, x in batch.items()}
        tokens = ((4, 50), np.dtype(np.int32))
        seed = ((4,), np.dtype(np.uint32))
        assert found == {"inputs": tokens, "targets": tokens, "example_seed": seed}
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
            start = BYTES.tobytes().index(inputs.astype(np.uint8).tobytes())
            assert targets[-1] == BYTES[start + 50]


def test_an_epoch_has_every_byte_once():
    batches = list(itertools.islice(stream(data.examples(BYTES, 50), batch_size=4), 2 * PER_EPOCH))
    epochs = [
        [row.tobytes() for batch in part for row in batch["targets"].astype(np.uint8)]
        for part in (batches[:PER_EPOCH], batches[PER_EPOCH:])
    ]
    every = sorted(BYTES[i + 1 : i + 51].tobytes() for i in range(0, 1000, 50))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]


def test_sequences_that_are_too_short():
    with pytest.raises(ValueError, match="sequence_length is 1; it must be at least 2"):
        data.examples(BYTES, 1)
