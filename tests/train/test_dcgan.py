"""DCGAN: whose gradients are whose, shapes, the distance that it is judged by, a small run."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from tests.train.cifar10 import PIXELS
from tests.train.runs import result, rows, smaller
from train import dcgan
from train.dcgan import DCGANConfig, adversarial_loss, init_params, init_statistics, main

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = DCGANConfig(4)
small_model = smaller(dcgan.SIZES, "small", (4,), autouse=True)
BATCH = {"image": PIXELS, "noise_seed": np.full(16, 7, np.uint32)}


# The model.


@pytest.mark.slow
def test_each_network_has_the_gradient_of_its_own_loss():
    """Held to two losses apart, the other network's parameters no argument of them."""
    params, state = init_params(CONFIG, 0), init_statistics(CONFIG)
    (loss, metrics), grads = jax.jit(
        jax.value_and_grad(lambda p: adversarial_loss(CONFIG)(p, BATCH, state)[:2], has_aux=True)
    )(params)

    def logits(generator, discriminator):
        both = {"generator": generator, "discriminator": discriminator}
        made = dcgan.merged(CONFIG, both, state)
        noise = jax.random.normal(jax.random.key(7), (16, 100))
        judged = made.discriminator
        real = jnp.asarray(PIXELS, jnp.float32) / 127.5 - 1
        return judged(real), judged(made.generator(noise, train=True))

    def discriminator_loss(own):
        real, made = logits(params["generator"], own)
        return -jnp.mean(jnp.log(jax.nn.sigmoid(real)) + jnp.log(1 - jax.nn.sigmoid(made)))

    def generator_loss(own):
        return -jnp.mean(jnp.log(jax.nn.sigmoid(logits(own, params["discriminator"])[1])))

    for name, of in (("discriminator", discriminator_loss), ("generator", generator_loss)):
        expected, gradient = jax.jit(jax.value_and_grad(of))(params[name])
        assert metrics[f"{name}_loss"] == pytest.approx(float(expected), rel=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5),
            grads[name],
            gradient,
        )
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3
    assert loss == pytest.approx(float(sum(metrics.values())), rel=1e-6)


# Batches.


# The distance.


def test_the_pyramid_adds_up_to_the_image():
    whole = PIXELS.astype(np.float32)
    fine, coarse = dcgan.laplacian_pyramid(whole)
    assert (fine.shape, coarse.shape) == ((16, 32, 32, 3), (16, 16, 16, 3))
    spread = np.zeros_like(whole)
    spread[:, ::2, ::2] = coarse
    # The weights of Burt and Adelson, sum by sum.
    kernel = np.outer(*[np.array([1, 4, 6, 4, 1]) / 8] * 2)
    padded = np.pad(spread, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    wider = sum(
        kernel[i, j] * padded[:, i : i + 32, j : j + 32]
        for i, j in itertools.product(range(5), repeat=2)
    )
    np.testing.assert_allclose(fine + wider, whole, atol=1e-3)
    # Of one colour, nothing is left on the fine level.
    flat, _ = dcgan.laplacian_pyramid(np.full((1, 32, 32, 3), 9.0, np.float32))
    np.testing.assert_allclose(flat, 0, atol=1e-4)


# A whole run.

RUN = ["--workers=2", "--batch-size=8", "--steps=6", "--warmup=3", "--checkpoint-every=3"]


@pytest.mark.slow
def test_report_and_samples(cifar10, tmp_path):
    out, name = tmp_path / "run", "onebit_adam_frozen"
    command = [*RUN, "--data", str(cifar10), "--optimizers", name, "--out", str(out)]
    assert main(command) == 0
    report = (out / "report.md").read_text()
    assert report.startswith("# DCGAN small, 2 workers, ")
    assert "Held out: 10 images." in report
    found = result(out / name)
    assert f"{found['sliced_wasserstein']:.4f}" in report
    assert found["sliced_wasserstein"] == np.mean(found["sliced_wasserstein_levels"])
    with PIL.Image.open(out / name / "samples.png") as samples:
        assert samples.size == (256, 256)
    logged = rows(out / name)
    assert [row["phase"] for row in logged] == ["warmup"] * 3 + ["compression"] * 3
    for row in logged:
        assert row["discriminator_loss"] + row["generator_loss"] == pytest.approx(
            row["loss"], rel=1e-5
        )
