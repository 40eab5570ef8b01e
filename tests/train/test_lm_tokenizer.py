"""The language model's data: tokenizers, what their tokens stand for, and batches of them."""

import itertools

import numpy as np
import pytest

from train.corpus import read_corpus
from train.lm import data
from train.lm.data import FILE, ByteTokenizer, load_bpe, train_bpe
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
