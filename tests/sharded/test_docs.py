"""The code of docs/sharded.md runs as it stands there."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from tests.sharded.meshes import assert_replicas_agree

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "sharded.md"

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    first, resizing, own_step, *optimizers = blocks
    assert len(optimizers) == 2
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["metrics"]["loss"] < 0.05
    assert_replicas_agree(names["state"][0])
    assert names["params"]["up"].shape == (16, 64)
    goes_on(resizing, first, dict(names))
    params = {name: np.asarray(x) / 2 for name, x in names["params"].items()}

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    own = names | {"params": jax.tree.map(jnp.copy, names["params"]), "loss_fn": loss_fn}
    exec(own_step, own)
    assert own["metrics"]["loss"] < 0.05
    for optimizer in optimizers:
        exec(optimizer, names)
        state = (params, names["tx"].init(params))
        state = onebit_jax.worker_copies(state, names["mesh"], axis_name="data")
        # Another function, or jit would take the last program, of the last `tx`.
        step = onebit_jax.worker_step(names["train_step"], names["mesh"], axis_name="data")
        step, losses = jax.jit(step), []
        for _ in range(40):
            state, metrics = step(state, names["batch"])
            losses.append(np.asarray(metrics["loss"]))
        assert losses[-1] < losses[0] / 2


def goes_on(resizing: str, first: str, names: dict[str, Any]) -> None:
    """Trains on the smaller mesh, by what the first block makes for a mesh."""
    exec(resizing, names)
    names["mesh"] = names["fewer"]
    made = re.findall(r"^(?:tx = .*?^\)$|def .*?^    return .*?$|step = .*?$)", first, re.M | re.S)
    exec("\n".join(made), names)
    batch = jax.device_get(names["batch"])
    loss = float(names["metrics"]["loss"])
    for _ in range(10):
        names["state"], metrics = names["step"](names["state"], batch)
    assert metrics["loss"] < loss
