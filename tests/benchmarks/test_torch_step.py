"""The models in PyTorch that `train`'s are timed beside: they must train alike."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.torch_step import __main__ as torch_step
from train.bert.heads import FineTuned, SequenceClassifier
from train.bert.heads import classification_loss as class_loss
from train.bert.model import BertConfig
from train.bert.weights import Pretrained
from train.lm.model import LMConfig, next_token_loss
from train.lm.model import init_params as init_lm
from train.resnet import model as images

RATES = [1e-2, 2e-2, 1e-2]
MAX_NORM = 0.3


class Case(NamedTuple):
    """A model: PyTorch's shape of it, our parameters and loss, and random batches."""

    shape: tuple[Any, ...]
    params: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]


def lm_case() -> Case:
    config = LMConfig(layers=2, hidden=32, heads=4, feed_forward=48)

    def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
        tokens = rng.integers(256, size=(2, 3, 20), dtype="i4")
        return {"inputs": tokens[0], "targets": tokens[1], "example_seed": np.zeros(3, "u4")}

    loss = next_token_loss(config)
    return Case(
        (config, 20), init_lm(config, seed=0), lambda params, of: loss(params, of)[0], batch
    )


def bert_case() -> Case:
    config = BertConfig(2, 32, 4, 48, vocab_size=99, dropout=0.0)
    model = FineTuned(lambda rngs: SequenceClassifier(config, 3, rngs))
    nothing: Any = None
    params = model.init(Pretrained(config, {}, nothing), seed=0)

    def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
        lengths = np.array([[12], [20], [7]])
        return {
            "input_ids": rng.integers(99, size=(3, 20), dtype="i4"),
            "token_type_ids": rng.integers(2, size=(3, 20), dtype="i4"),
            "attention_mask": (np.arange(20) < lengths).astype("i4"),
            "labels": rng.integers(3, size=3, dtype="i4"),
            "example_seed": np.zeros(3, "u4"),
        }

    loss = class_loss(model, 3)
    return Case((config, 3), params, lambda params, of: loss(params, of)[0], batch)


def resnet_case() -> Case:
    config = images.ResNetConfig((1, 1, 1), (4, 6, 8), bottleneck=False, projection=False)
    statistics = images.init_statistics(config)

    def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "image": rng.integers(256, size=(5, 32, 32, 3), dtype="u1"),
            "label": rng.integers(10, size=5, dtype="i4"),
        }

    loss = images.classification_loss(config)
    params = images.init_params(config, seed=0)
    return Case((config,), params, lambda params, of: loss(params, of, statistics)[0], batch)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: pip install torch to hold its models to ours",
)
@pytest.mark.parametrize(
    ("module", "make"), [("lm", lm_case), ("bert", bert_case), ("resnet", resnet_case)]
)
def test_losses_of_a_training_are_equal(module: str, make: Callable[[], Case]):
    case = make()
    torch_training = importlib.import_module("benchmarks.torch_step.training")
    model = importlib.import_module(f"benchmarks.torch_step.{module}").Model(*case.shape)
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, case.params)
    theirs = torch_training.Training(
        model,
        jax.device_get(params),
        learning_rates=RATES,
        weight_decay=0.1,
        max_grad_norm=MAX_NORM,
    )
    decayed = jax.tree.map(lambda x: x.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adamw(lambda t: jnp.array(RATES)[t], weight_decay=0.1, mask=decayed),
    )
    loss_and_gradients = jax.jit(jax.value_and_grad(case.loss))
    opt_state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for batch in [case.batch(rng) for _ in RATES]:
        loss, grads = loss_and_gradients(params, batch)
        assert optax.tree.norm(grads) > MAX_NORM
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert theirs.step(batch) == pytest.approx(float(loss), rel=1e-5)


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torch_step.main(torch_step.Options()) == 2
    assert capsys.readouterr().err.startswith("error: torch is not installed; pip install torch==")


def test_without_a_models_data_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    options = torch_step.Options(models=("resnet-20",), json=tmp_path / "figures.json")
    assert torch_step.main(options) == 2
    assert "--data" in capsys.readouterr().err
    assert not options.json.exists()
