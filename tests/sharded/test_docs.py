"""The code of docs/sharded.md runs as it stands there."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

import onebit_jax
from tests.sharded.meshes import assert_replicas_agree

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "sharded.md"

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_the_page_runs():
    first, outside = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["metrics"]["loss"] < 0.05
    assert_replicas_agree(names["state"][0])
    assert names["params"]["up"].shape == (16, 64)
    exec(outside, names)
    params = names["params"]
    state = onebit_jax.worker_copies(
        (params, names["tx"].init(params)), names["mesh"], axis_name="data"
    )
    step = jax.jit(onebit_jax.worker_step(names["train_step"], names["mesh"], axis_name="data"))
    losses = []
    for _ in range(20):
        state, metrics = step(state, names["batch"])
        losses.append(np.asarray(metrics["loss"]))
    assert losses[-1] < losses[0] / 2
