"""What a training shows: a bar, which says what is compiled before it is, and pictures."""

import io

from tests import small_task
from train import pictures
from train.metrics import StepBar, announced
from train.registry import REGISTRY


def test_that_a_step_is_compiled_is_said_while_it_is():
    said = []
    loss_fn = announced(small_task.loss_and_metrics, lambda: said.append(len(losses)))
    step, (params, opt_state) = small_task.start(small_task.onebit(), loss_fn=loss_fn)
    losses = []
    for batch in small_task.make_batches(8):
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(metrics["loss"])
    assert set(said) == {0, small_task.WARMUP}


def test_a_bar_goes_on_where_a_run_was_stopped():
    stream = io.StringIO()
    with StepBar("small", 8, done=5, file=stream) as bar:
        bar.update()
        bar.compiling()
    last = stream.getvalue().split("\r")[-1]
    assert "6/8" in last
    assert "compiling a step" in last


# Pictures.


def test_an_optimizer_has_one_colour_and_no_two_curves_one_look():
    labels = [REGISTRY[name].label for name in ("adam", "onebit_adam", "muon", "onebit_muon")]
    together = pictures.styles(labels)
    assert together == [pictures.styles([label])[0] for label in labels]
    variants = ["1-bit Adam", "1-bit Adam, one buffer", "1-bit Adam, bare optimizer"]
    looks = pictures.styles(variants)
    assert len({x["color"] for x in looks}) == 1
    assert len({x["linestyle"] for x in looks}) == 3
