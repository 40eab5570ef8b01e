"""What options of how a model is computed may change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def assert_options_change_little(loss_of, config, params, atol=1e-5, rounding=0.02):
    """Of `loss_of(config, params)`, a pair, the loss first.

    Recomputed in the backward pass it is the same, with its gradients; in bfloat16 nearly.
    """

    def found(**options):
        asked = dataclasses.replace(config, **options)
        return jax.jit(jax.value_and_grad(lambda p: loss_of(asked, p), has_aux=True))(params)

    plain, again, rounded = found(), found(remat=True), found(bfloat16=True)
    losses = [float(x[0][0]) for x in (plain, again, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=atol), plain, again)
    assert 0 < abs(losses[2] - losses[0]) < rounding * losses[0]
    assert {x.dtype for x in jax.tree.leaves(rounded)} == {jnp.dtype("float32")}
