"""What tests of whole runs have in common."""

import contextlib
import io
import json
import os
import pathlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import traverse_util

from onebit_jax.checkpoint import Checkpoints
from train.bert import weights
from train.bert.model import BertConfig, init_params
from train.launch import StopRequest

_REQUESTED = StopRequest.requested


def smaller(sizes: dict[str, Any], name: str, size: tuple[Any, ...], **options: Any) -> Any:
    """A fixture of modules: a model that compiles fast, in the place of one of the sizes."""

    @pytest.fixture(scope="module", **options)
    def model():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sizes, name, size)
            yield

    return model


def rows(folder):
    """The lines of a training's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder):
    """As `rows`, without what differs from run to run."""
    return [{key: x for key, x in row.items() if key != "seconds"} for row in rows(folder)]


def result(folder):
    """A training's `result.json`."""
    return json.loads((folder / "result.json").read_text())


def saved(folder):
    """The step of a training's last checkpoint, and its arrays by name."""
    step = max(Checkpoints(folder / "checkpoints").steps())
    path = folder / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        shapes = reader.metadata(path).item_metadata.tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        leaves = jax.tree_util.tree_leaves_with_path(reader.restore(path, restore_args=to_host))
    return step, {jax.tree_util.keystr(name): (x.shape, x.tobytes()) for name, x in leaves}


def printed(main, command):
    """What a program prints, which must succeed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(command) == 0
    return text.getvalue()


class CrashError(Exception):
    """What no program catches."""


def crash():
    raise CrashError


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def at_step(step, act):
    """Until the end of the context, a run acts so once so many steps are made."""

    def requested(self, done):
        if done + 1 == step:
            act()
        return _REQUESTED(self, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "requested", requested)
        yield


def assert_refused(
    main: Callable[[list[str]], int],
    options: Sequence[str],
    complaint: str,
    out: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asserts that a program says in one line what is wrong, and that nothing is written."""
    assert main([*options, "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("error: ")
    assert complaint in printed.err
    assert not out.exists()


def save_bert(folder, pretrained, **config):
    """Writes a checkpoint folder in Hugging Face's layout."""
    shape, params, tokenizer = pretrained
    folder.mkdir(parents=True, exist_ok=True)
    flat: Any = traverse_util.flatten_dict(params)
    tensors = {
        name if name.startswith("cls.") else f"bert.{name}": np.ascontiguousarray(
            flat[place].T if place[-1] == "kernel" else flat[place]
        )
        for name, place in weights._places(shape).items()
        if place in flat
    }
    safetensors.numpy.save_file(tensors, folder / weights.TENSORS)
    sizes = {theirs: getattr(shape, ours) for ours, theirs in weights._SHAPE.items()}
    values = weights._FIXED | sizes | {"hidden_dropout_prob": shape.dropout} | config
    (folder / weights.CONFIG).write_text(json.dumps(values))
    tokenizer.save_vocab(folder)


def save_tiny_bert(folder, tokenizer):
    """A checkpoint of a BERT that compiles fast; its folder."""
    config = BertConfig(
        layers=1, hidden=8, heads=2, feed_forward=16, vocab_size=tokenizer.vocab_size
    )
    params = jax.tree.map(np.asarray, init_params(config, seed=0))
    save_bert(folder, weights.Pretrained(config, params, tokenizer))
    return str(folder)
