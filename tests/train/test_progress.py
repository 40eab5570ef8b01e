"""What a training shows: a bar, which says what is compiled before it is, and pictures."""

import io
import logging

import jax
import numpy as np
import pytest

from tests import small_task
from train import pictures, report
from train.metrics import StepBar, announced
from train.optimizers import OPTIMIZERS

PLAIN, WARMUP, COMPRESSED = SAID = (
    "compiling the step",
    "compiling the warm-up step",
    "compiling the compressed step",
)


@pytest.fixture
def stream():
    """Holds what a bar shows and what JAX says that it compiles, in order."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    with jax.log_compiles():
        yield stream
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (small_task.dense(), {0: PLAIN}),
        (small_task.onebit(), {0: WARMUP, small_task.WARMUP: COMPRESSED}),
    ],
    ids=["dense", "phased"],
)
def test_what_is_compiled_is_said_before_it_is(tx, expected, stream):
    with StepBar("small", 8, file=stream) as bar:
        loss_fn, announcing = announced(small_task.loss_and_metrics, tx, bar.compiling)
        step, (params, opt_state) = small_task.start(announcing, loss_fn=loss_fn)
        for made, batch in enumerate(small_task.make_batches(8)):
            before = len(stream.getvalue())
            params, opt_state, _ = step(params, opt_state, batch)
            shown = stream.getvalue()[before:]
            assert {text for text in SAID if text in shown} == {expected.get(made)} - {None}
            if made in expected:
                compiled = shown.index("XLA compilation of jit(step)")
                assert shown.index(expected[made]) < compiled
            bar.set_postfix_str("trained", refresh=False)
            bar.update()


def test_a_bar_goes_on_where_a_run_was_stopped():
    stream = io.StringIO()
    with StepBar("small", 8, done=5, file=stream) as bar:
        bar.update()
        bar.compiling("compression")
    last = stream.getvalue().split("\r")[-1]
    assert "6/8" in last
    assert COMPRESSED in last


# Pictures.


def curve(label, losses, frozen_at=-1):
    steps = np.arange(1, len(losses) + 1)
    return pictures.LossCurve(label, 1.0, steps, np.asarray(losses), 100.0 * steps, frozen_at)


def test_the_end_of_a_warmup_is_within_the_picture():
    falling = np.geomspace(8.0, 1.0, 400)
    adam, onebit = curve("Adam", falling), curve("1-bit Adam", falling, frozen_at=30)
    end = falling[29]
    limits = pictures._loss_limits([adam, onebit])
    without = pictures._loss_limits([adam, onebit._replace(frozen_at=-1)])
    assert limits
    assert without
    assert limits[0] < falling[-1]
    assert without[1] < end < limits[1] < falling[0]


def test_an_optimizer_has_one_colour_and_no_two_curves_one_look():
    labels = [OPTIMIZERS[name].label for name in ("adam", "onebit_adam", "muon", "onebit_muon")]
    together = pictures.styles(labels)
    assert together == [pictures.styles([label])[0] for label in labels]
    variants = ["1-bit Adam", "1-bit Adam, one buffer", "1-bit Adam, bare optimizer"]
    looks = pictures.styles(variants)
    assert len({x["color"] for x in looks}) == 1
    assert len({x["linestyle"] for x in looks}) == 3


@pytest.mark.parametrize(("sent", "bits"), [(6_022_470, 32), (1_530_720, 8), (777_000, 4)])
def test_a_warmup_is_named_by_its_bits(tmp_path, sent, bits):
    result = {"parameters": 1_003_745, "bytes_a_step": {"warmup": sent}}
    assert report._warmup_bits(report.Run(tmp_path, {"workers": 4}, result, [])) == bits
