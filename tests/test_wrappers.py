"""Wrappers around an exchanging optimizer work, or are refused as docs/wrappers.md says."""
# ruff: noqa: E501

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint import v1 as ocp

import onebit_jax
from tests import small_task
from tests.small_task import MESH, WARMUP, assert_equal, assert_replicas_agree, make_batches

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "wrappers.md"
STEPS, SAVED_AFTER = 12, 6
# Optimizers that work.
WORKS = [
    'optax.inject_hyperparams(onebit_jax.onebit_adam)(learning_rate=1e-3, warmup=2000, axis_name="data")',
    "optax.chain(optax.clip_by_global_norm(1.0), onebit)",
    'optax.chain(onebit_jax.clip_by_common_norm(1.0, "data"), onebit)',
    "optax.chain(onebit, optax.clip_by_global_norm(0.1))",
    "optax.chain(mean, optax.clip_by_global_norm(1.0), adamw)",
    "optax.chain(optax.adaptive_grad_clip(0.1), onebit)",
    "optax.chain(optax.normalize_by_update_norm(), onebit)",
    "optax.chain(onebit, optax.normalize_by_update_norm())",
    "optax.chain(optax.centralize(), onebit)",
    "optax.chain(optax.add_noise(0.01, 0.55, key=0), onebit)",
    "optax.chain(optax.add_decayed_weights(1e-4), onebit)",
    "optax.chain(onebit_jax.per_worker(optax.zero_nans()), onebit)",
    "optax.chain(onebit_jax.per_worker(optax.trace(0.9)), bits, rate)",
    "optax.chain(bits, optax.trace(0.9), rate)",
    "optax.chain(onebit_jax.per_worker(optax.ema(0.9)), onebit)",
    "optax.chain(onebit, optax.ema(0.9))",
    "optax.chain(onebit, optax.apply_every(2))",
    "optax.chain(mean, optax.MultiSteps(adamw, 2))",
    'optax.chain(onebit_jax.scale_by_onebit_adam(warmup=2000, axis_name="data"), optax.scale_by_schedule(optax.linear_schedule(-1e-3, 0, 10_000)))',
    'optax.chain(onebit_jax.scale_by_onebit_adam(warmup=2000, axis_name="data"), optax.add_decayed_weights(0.01), rate)',
    "optax.chain(onebit, optax.contrib.reduce_on_plateau(patience=2))",
    "optax.contrib.schedule_free(onebit, 1e-3)",
    "optax.contrib.schedule_free(optax.chain(mean, optax.sgd(1e-2)), 1e-2)",
    "optax.chain(mean, optax.contrib.mechanize(adamw, s_init=0.1))",
    'optax.partition({"matrices": onebit, "vectors": optax.chain(mean, adamw)}, labels)',
    'optax.partition({"matrices": optax.chain(bits, optax.contrib.muon(1e-2)), "vectors": optax.chain(mean, adamw)}, labels)',
    'optax.partition({"matrices": optax.chain(mean, optax.contrib.muon(1e-2)), "vectors": onebit}, labels)',
    'optax.partition({"matrices": onebit, "vectors": optax.set_to_zero()}, labels)',
    "optax.selective_transform(onebit, freeze_mask=vectors)",
    "optax.chain(onebit, optax.freeze(vectors))",
    "optax.chain(mean, optax.masked(optax.add_decayed_weights(0.01), matrices), adamw)",
    "optax.flatten(onebit)",
    'onebit_jax.skip_nonfinite(onebit, "data")',
    "optax.chain(mean, optax.apply_if_finite(adamw, 3))",
    "optax.conditionally_mask(onebit, lambda step: step % 2 == 0)",
    "optax.chain(onebit, optax.conditionally_transform(optax.scale(0.5), lambda step: step > 5))",
    "optax.chain(onebit, optax.keep_params_nonnegative())",
    "on_fast(optax.lookahead(onebit, 5, 0.5))",
    "optax.chain(mean, optax.GradientTransformation(*optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))))",
    'optax.named_chain(("clip", optax.clip(1.0)), ("onebit", optax.with_extra_args_support(onebit)))',
    'optax.chain(onebit, optax.snapshot("norm", optax.tree.norm))',
]
# The essential words of the errors.
LATER = r"would differ between workers.*replicas would silently diverge.*per_worker"
REFUSED = {
    "optax.chain(optax.zero_nans(), onebit)": LATER,
    "optax.chain(optax.trace(0.9), bits, rate)": LATER,
    "optax.chain(optax.ema(0.9), onebit)": LATER,
    "optax.chain(optax.apply_every(2), onebit)": LATER,
    "optax.MultiSteps(onebit, 2)": r"acc_grads.*would differ.*accumulation=k",
    "optax.contrib.mechanize(onebit)": LATER,
    'optax.partition({"matrices": onebit, "vectors": adamw}, labels)': r"differ between workers",
    "optax.masked(onebit, matrices)": (
        r"\['bias'\] would differ between workers.*replace optax.masked"
    ),
    "optax.apply_if_finite(onebit, 3)": r"they would wait for ever.*onebit_jax.skip_nonfinite",
    "optax.conditionally_transform(onebit, lambda step: step % 2 == 0)": (
        r"updates.* would differ between workers"
    ),
    "optax.lookahead(onebit, 5, 0.5)": r"tree changed since init.*fast",
    "optax.contrib.sam(onebit, optax.sgd(0.05))": "unexpected keyword argument 'phase'",
    "optax.GradientTransformation(*optax.contrib.sam(onebit, optax.sgd(0.05)))": (
        r"differ between workers"
    ),
    'optax.chain(optax.snapshot("norm", optax.tree.norm), onebit)': LATER,
    'optax.chain(onebit, optax.monitor({"norm": optax.tree.norm}))': "structure.*measurements",
    "adamw": r"would differ between workers.*onebit_jax.mean_gradients\('data'\) before what",
    "optax.sgd(1e-2)": r"updates.* would differ between workers",
    "onebit_jax.per_worker(onebit)": (
        r"per_worker was given an optimizer that marks each worker's state itself"
    ),
}


@functools.cache
def names() -> dict[str, Any]:
    """What the page defines for its tables, with a warm-up that a test sees the end of."""
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    matrices = {"layer": {"kernel": True, "bias": False}}
    vectors = jax.tree.map(lambda x: not x, matrices)
    defined = {"optax": optax, "onebit_jax": onebit_jax, "jax": jax}
    exec(_with_short_warmup(block), defined)
    return defined | {"matrices": matrices, "vectors": vectors}


def made(code: str) -> Any:
    """The optimizer that the page writes."""
    return eval(_with_short_warmup(code), names())


def _with_short_warmup(code: str) -> str:
    return code.replace("warmup=2000", f"warmup={WARMUP}, b2={small_task.B2}")


def task(code: str) -> tuple[Any, Any]:
    """The parameters and the loss, which of lookahead are its own."""
    if "lookahead" not in code:
        return small_task.make_params(), small_task.loss_fn
    params = jax.tree.map(jnp.asarray, small_task.make_params())
    pair = optax.LookaheadParams(params, jax.tree.map(jnp.copy, params))
    return pair, lambda params, batch: small_task.loss_fn(params.fast, batch)


def trained(step, state, batches, takes_value):
    """Goes on; `value` is the loss of the step before."""
    value, losses = jax.numpy.float32(1), []
    for batch in batches:
        extra = {"value": value} if takes_value else {}
        *state, metrics = step(*state, batch, **extra)
        losses.append(float(metrics["loss"]))
        value = metrics["loss"]
    return tuple(state), losses


@pytest.mark.parametrize(
    "code",
    # The others are among the slow tests.
    [WORKS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in WORKS[1:])],
)
def test_works(code, tmp_path):
    """Through the end of warm-up, and through a checkpoint in the middle of the run."""
    tx, (params, loss) = made(code), task(code)
    step = onebit_jax.train_step(loss, tx, MESH)
    go_on = functools.partial(trained, step, takes_value="reduce_on_plateau" in code)
    params = small_task.replicated(params)
    start = params, onebit_jax.init(tx, params, MESH)
    target = small_task.abstract(start)
    batches = make_batches(1) * STEPS
    middle, before = go_on(start, batches[:SAVED_AFTER])
    ocp.save(tmp_path / "checkpoint", middle)
    end, after = go_on(middle, batches[SAVED_AFTER:])
    assert after[-1] < before[0]
    assert_replicas_agree(end)

    restored = ocp.load(tmp_path / "checkpoint", target)
    resumed, _ = go_on(restored, batches[SAVED_AFTER:])
    assert_equal(resumed, end)


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code):
    """By `init`, or before the first step is compiled, by Python where it says enough."""
    tx, (params, loss) = made(code), task(code)

    def begin():
        state = onebit_jax.init(tx, params, MESH)
        onebit_jax.train_step(loss, tx, MESH).lower(params, state, *make_batches(1))

    words = re.compile(REFUSED[code], re.DOTALL)
    with pytest.raises((ValueError, TypeError), match=words) as error:
        begin()
    assert error.type is ValueError or "sam(" in code


def test_the_page_has_what_is_refused():
    rows = re.findall(r"^\| `(.+?)` \| ", PAGE.read_text(), re.MULTILINE)
    assert set(rows) == REFUSED.keys()
