"""DCGAN: whose gradients are whose, shapes, the distance that it is judged by, a small run."""

import base64
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from tests.train.cifar10 import IMAGES, PIXELS
from tests.train.options import assert_options_change_little
from tests.train.runs import result, rows, smaller
from train import dcgan, images
from train.dcgan import DCGANConfig, adversarial_loss, init_params, init_statistics, main
from train.stream import stream

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


@pytest.mark.slow
def test_options_of_how_it_is_computed_change_little():
    params, state = init_params(CONFIG, 0), init_statistics(CONFIG)

    def loss(config, params):
        value, _, changed = adversarial_loss(config)(params, BATCH, state)
        return value, changed

    assert_options_change_little(loss, CONFIG, params)


# Batches.


def test_batches_have_every_image_once_an_epoch_half_of_them_mirrored():
    seen, mirrored, seeds = [], 0, set()
    for batch in itertools.islice(stream(images.mirrored_images(IMAGES), batch_size=4), 16):
        seeds |= set(batch["noise_seed"].tolist())
        for image in batch["image"]:
            [(number, swapped)] = [
                (number, swapped)
                for number, own in enumerate(PIXELS)
                for swapped in (False, True)
                if np.array_equal(own[:, ::-1] if swapped else own, image)
            ]
            seen.append(number)
            mirrored += swapped
    np.testing.assert_array_equal(
        np.sort(np.array(seen).reshape(-1, 16)), np.tile(np.arange(16), (4, 1))
    )
    assert 20 < mirrored < 44
    assert len(seeds) == 64


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


def test_unlike_images_are_farther_than_like_ones():
    rng = np.random.default_rng(0)
    # Smooth on all scales, and noise.
    smooth = rng.standard_normal((3, 64, 32, 32, 3)).cumsum(2).cumsum(3)
    smooth = (128 + 8 * smooth / smooth.std()).astype(np.uint8)
    noise = rng.integers(120, 136, size=(64, 32, 32, 3), dtype=np.uint8)
    like = dcgan.sliced_wasserstein(smooth[0], smooth[1])
    unlike = dcgan.sliced_wasserstein(smooth[0], noise)
    assert len(like) == len(unlike) == 2
    assert all(1.5 * a < b for a, b in zip(like, unlike, strict=True))


@pytest.mark.slow
def test_the_distances_that_the_docs_compare_with(shared_dir):
    """Two sets of real images, and one against copies of a single image."""
    real = images.read_images(shared_dir / "data/cifar10" / images.TEST).pixels[:4096]
    first, second = real[:2048], real[2048:]
    assert np.mean(dcgan.sliced_wasserstein(first, second)) == pytest.approx(10.3, abs=0.1)
    copies = np.repeat(second[:1], 2048, axis=0)
    assert np.mean(dcgan.sliced_wasserstein(first, copies)) == pytest.approx(218, abs=1)


def test_samples_stand_in_rows_of_eight():
    made = np.random.default_rng(0).integers(256, size=(10, 32, 32, 3), dtype=np.uint8)
    grid = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(dcgan.png(made)))))
    assert grid.shape == (256, 256, 3)
    np.testing.assert_array_equal(grid[:32, 32:64], made[1])
    np.testing.assert_array_equal(grid[32:64, :32], made[8])
    assert not grid[64:].any()


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
