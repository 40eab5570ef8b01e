"""What pictures of trainings show: the ends of warm-ups, and optimizers in colours of their own."""

import numpy as np
import pytest

from train import pictures, report
from train.optimizers import OPTIMIZERS


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
