"""What tests of the training programs have in common."""

import jax
import pytest

from tests.train.cifar10 import LABELS, PIXELS, write
from tests.train.runs import smaller
from train import images
from train.bert import model as bert_model
from train.bert.tokenizer import train_tokenizer
from train.corpus import read_corpus, split_heldout
from train.lm import model

small_language_model = smaller(model.SIZES, "nano", (1, 16, 2, 32))
small_bert = smaller(bert_model.SIZES, "tiny", (1, 16, 2, 32))


@pytest.fixture(scope="session", autouse=True)
def started():
    """The programs set the number of CPU devices, unless JAX runs already, on conftest's eight."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def documents():
    """The text inside Python itself, to train on and held out."""
    return split_heldout(read_corpus(None))


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents[0], 1024)


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """A folder of sixteen images to train on and ten to judge on."""
    path = tmp_path_factory.mktemp("cifar10")
    write(path / images.TRAIN)
    write(path / images.TEST, PIXELS[:10], LABELS[:10])
    return path
