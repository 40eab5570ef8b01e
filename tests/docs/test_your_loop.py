"""The loops of docs/your-loop.md: both sides of each diff run, and reach the same loss."""

import pathlib
import re

import jax
import numpy as np
import pytest

import onebit_jax
from tests.small_task import MESH

PAGE = (pathlib.Path(__file__).parents[2] / "docs/your-loop.md").read_text()
BEGINNING, WEIGHTED, FROM_PROCESSES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.M)
DIFFS = dict(
    re.findall(
        r"^(?:#+ |(?=Flax's))([^\n]+)\n(?:(?!^#|^```diff).)*?^```diff\n(.*?)^```$",
        PAGE,
        re.DOTALL | re.M,
    )
)


def side(diff, sign):
    """One side of a diff: lines with this sign, and those without."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def run(code):
    """The names that a program leaves; the tests have made their devices already."""
    beginning = re.sub(r"^jax.config.update.*$", "", BEGINNING, flags=re.M)
    if "pmap" not in code:  # which takes all devices
        code = code.replace("jax.device_count()", "4")
    names = {}
    exec(compile(beginning + code.replace("print(i, float", "(float"), "page", "exec"), names)
    return names


def test_every_loop_is_found():
    assert len(DIFFS) == PAGE.count("```diff") == 8


# Bits in the warm-up and refreshes take the longest to compile: one loop has them.
PLAIN = {
    "warmup=": "warmup_bits=32, variance_refreshes=None, warmup=",
    '"warmup":': '"warmup_bits": 32, "variance_refreshes": None, "warmup":',
}
FIRST, *OTHERS = DIFFS


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (FIRST, {}),
        *((name, PLAIN) for name in OTHERS),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_both_sides_of_a_loop_reach_the_same_loss(name, changed):
    code = side(DIFFS[name], "+")
    for old, new in changed.items():
        code = code.replace(old, new)
    before, after = run(side(DIFFS[name], "-")), run(code)
    start = float(before["loss_fn"](before["make_params"](), before["make_batch"](150, 512)))
    losses = float(before["held_out"]), float(after["held_out"])
    assert losses[0] < 0.3 * start
    assert losses[1] < max(1.2 * losses[0], losses[0] + 0.02), losses
    assert not getattr(after.get("found"), "warnings", ())


def test_a_mean_over_tokens_weighs_all_alike():
    names = run(f"import onebit_jax\n{WEIGHTED}")
    batch = names["make_batch"](0, 64) | {"mask": np.float32(np.arange(64) % 64 < 10)}
    params = names["make_params"]()
    tx = onebit_jax.onebit_adam(1e-2, warmup=40, warmup_bits=32, axis_name="data")
    step = onebit_jax.train_step(names["weighted_loss"], tx, MESH, accumulation=2)
    loss = step(params, onebit_jax.init(tx, params, MESH), batch)[2]["loss"]
    expected = names["loss_fn"](names["make_params"](), jax.tree.map(lambda x: x[:10], batch))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_rows_of_a_process_that_do_not_fit_are_refused():
    place = run(FROM_PROCESSES)["on_mesh"]
    rows = jax.sharding.NamedSharding(MESH, jax.P("data"))
    assert place(np.zeros((8, 3)), 8, rows).shape == (8, 3)
    with pytest.raises(ValueError, match="shape"):
        place(np.zeros((6, 3)), 8, rows)


def test_the_page_is_short():
    words = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split()
    assert len(words) <= 1200
