"""The model in PyTorch that `train.lm`'s is timed beside: it must train alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.lm.model import LMConfig, init_params, next_token_loss

pytest.importorskip("torch", reason="pip install torch to hold its model to ours")

RATES = [1e-2, 2e-2, 1e-2]
MAX_NORM = 0.3


def test_losses_of_a_training_are_equal():
    from benchmarks import torch_step

    config = LMConfig(layers=2, hidden=32, heads=4, feed_forward=48)
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, init_params(config, seed=0))
    theirs = torch_step.in_torch(
        torch_step.Model(config, 20),
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
    of = next_token_loss(config)
    loss_and_gradients = jax.jit(jax.value_and_grad(lambda params, batch: of(params, batch)[0]))
    opt_state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for _ in RATES:
        tokens = rng.integers(256, size=(2, 3, 20), dtype="i4")
        batch = {"inputs": tokens[0], "targets": tokens[1], "example_seed": np.zeros(3, "u4")}
        loss, grads = loss_and_gradients(params, batch)
        assert optax.tree.norm(grads) > MAX_NORM
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert theirs(batch) == pytest.approx(float(loss), rel=1e-5)
