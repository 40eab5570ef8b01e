"""The language model in PyTorch that `train.lm` is timed beside: it must train alike."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import lm_step
from train.lm.model import LMConfig, decay_mask, init_params, next_token_loss

CONFIG = LMConfig(layers=2, hidden=32, heads=4, feed_forward=48)
RATES = [1e-2, 2e-2, 1e-2]
MAX_NORM = 0.3


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: pip install torch to hold its model to ours",
)
def test_losses_of_a_training_are_equal():
    lm_torch = importlib.import_module("benchmarks.lm_torch")
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 3 * x, init_params(CONFIG, seed=0))
    batches = [
        {name: rng.integers(256, size=(3, 20), dtype=np.int32) for name in ("inputs", "targets")}
        for _ in RATES
    ]
    theirs = lm_torch.Training(
        CONFIG,
        jax.device_get(params),
        sequence_length=20,
        learning_rates=RATES,
        weight_decay=0.1,
        max_grad_norm=MAX_NORM,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_NORM),
        optax.adamw(lambda t: jnp.array(RATES)[t], weight_decay=0.1, mask=decay_mask),
    )
    loss_and_gradients = jax.jit(jax.value_and_grad(next_token_loss(CONFIG), has_aux=True))
    opt_state = optimizer.init(params)
    for batch in batches:
        (loss, _), grads = loss_and_gradients(params, batch)
        assert optax.tree.norm(grads) > MAX_NORM
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert theirs.step(batch) == pytest.approx(float(loss), rel=1e-5)


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lm_step.main(lm_step.Options()) == 2
    assert capsys.readouterr().err.startswith("error: torch is not installed; pip install torch==")
