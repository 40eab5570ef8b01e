"""The progress bar says what is compiled, before it is."""

import io
import logging

import jax
import pytest

from tests import small_task
from train.metrics import StepBar, announced

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
