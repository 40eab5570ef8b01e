"""Every wrapper of docs/wrappers.md works or is refused in words, as its table says.

The tables are made of the cases here. To write them anew:

    JAX_NUM_CPU_DEVICES=8 .venv/bin/python -m tests.test_wrappers
"""

import functools
import pathlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

import onebit_jax
from onebit_jax.markers import is_per_worker
from tests.small_task import (
    B2,
    MESH,
    WARMUP,
    assert_equal,
    loss_fn,
    make_batches,
    make_params,
)
from train.checkpoint import abstract

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "wrappers.md"
STEPS, SAVED_AFTER = 12, 6


class Works(NamedTuple):
    """An optimizer as the docs write it, and what to know of it."""

    code: str
    note: str
    takes_value: bool = False


class Refused(NamedTuple):
    """The same of one that `init` refuses, and the essential words of its error."""

    code: str
    note: str
    words: str


class Section(NamedTuple):
    title: str
    cases: list[Works | Refused]


LATER = r"would differ between workers.*replicas silently diverge.*per_worker"
SECTIONS = [
    Section(
        "Clipping and what else changes gradients",
        [
            Works(
                "optax.chain(optax.clip_by_global_norm(1.0), onebit)",
                "Before an exchange it clips each worker alone, by its own norm: the mean bends "
                "towards workers with small gradients. Take `clip_by_common_norm`, or "
                "`train_step(..., max_grad_norm=1.0)`.",
            ),
            Works(
                'optax.chain(onebit_jax.clip_by_common_norm(1.0, "data"), onebit)',
                "One factor for all workers, for one float32 more in the exchange.",
            ),
            Works(
                "optax.chain(onebit, optax.clip_by_global_norm(0.1))",
                "Clips the step that all take, learning rate and decay included.",
            ),
            Works(
                "optax.chain(mean, optax.clip_by_global_norm(1.0), adamw)",
                "Clips the mean gradient, as on one device.",
            ),
            Works(
                "optax.chain(optax.adaptive_grad_clip(0.1), onebit)",
                "Clips each worker alone, as every clip before an exchange.",
            ),
            Works(
                "optax.chain(optax.normalize_by_update_norm(), onebit)",
                "Every worker's gradient counts alike, whatever its norm: seldom what is wanted.",
            ),
            Works(
                "optax.chain(onebit, optax.normalize_by_update_norm())",
                "Normalizes the step that all take.",
            ),
            Works("optax.chain(optax.centralize(), onebit)", "Linear: the same as on the mean."),
            Works(
                "optax.chain(optax.add_noise(0.01, 0.55, key=0), onebit)",
                "All workers draw the same noise, as on one device.",
            ),
            Works(
                "optax.chain(optax.add_decayed_weights(1e-4), onebit)",
                "L2 regularization: the decay goes through the variance. For AdamW's give "
                "`onebit_adam(weight_decay=...)`.",
            ),
            Refused(
                "optax.chain(optax.zero_nans(), onebit)",
                "Its state says where *this worker's* gradients were NaN: wrap it, as below.",
                LATER,
            ),
            Works(
                "optax.chain(onebit_jax.per_worker(optax.zero_nans()), onebit)",
                "A worker with a NaN sends 0 there. `train_step` leaves the whole step out before "
                "it comes to that, unless given `max_skipped=None`.",
            ),
        ],
    ),
    Section(
        "Momentum, averages and accumulation",
        [
            Refused(
                "optax.chain(optax.trace(0.9), bits, rate)",
                "Each worker's own momentum, not marked as its own.",
                LATER,
            ),
            Works(
                "optax.chain(onebit_jax.per_worker(optax.trace(0.9)), bits, rate)",
                "Momentum on each worker, then one bit per parameter of it.",
            ),
            Works(
                "optax.chain(bits, optax.trace(0.9), rate)",
                "Momentum of what was received, the same on all workers.",
            ),
            Refused(
                "optax.chain(optax.ema(0.9), onebit)",
                "As `trace`.",
                LATER,
            ),
            Works(
                "optax.chain(onebit_jax.per_worker(optax.ema(0.9)), onebit)",
                "Smooths before Adam does; it delays gradients by some nine steps.",
            ),
            Works("optax.chain(onebit, optax.ema(0.9))", "Smooths the steps."),
            Refused(
                "optax.chain(optax.apply_every(2), onebit)",
                "Sums each worker's own gradients: give `train_step(..., accumulation=2)`.",
                LATER,
            ),
            Works(
                "optax.chain(onebit, optax.apply_every(2))",
                "Applies two steps at once, and exchanges in each. To exchange less give "
                "`train_step(..., accumulation=2)`.",
            ),
            Refused(
                "optax.MultiSteps(onebit, 2)",
                "It would exchange in every micro-step and throw the result away: give "
                "`train_step(..., accumulation=2)`.",
                r"MultiSteps would keep each worker's own sum.*accumulation=k",
            ),
            Works(
                "optax.chain(mean, optax.MultiSteps(adamw, 2))",
                "Works behind the mean; `accumulation=2` exchanges half as often.",
            ),
        ],
    ),
    Section(
        "Schedules and hyperparameters",
        [
            Works(
                "optax.inject_hyperparams(onebit_jax.onebit_adam)"
                '(learning_rate=1e-3, warmup=2000, axis_name="data")',
                'Numbers may be changed between steps: `opt_state.hyperparams["learning_rate"]`; '
                "put them back as arrays of the same dtype.",
            ),
            Works(
                'optax.chain(onebit_jax.scale_by_onebit_adam(warmup=2000, axis_name="data"), '
                "optax.scale_by_schedule(optax.linear_schedule(-1e-3, 0, 10_000)))",
                "The same as `onebit_adam(schedule)`.",
            ),
            Works(
                'optax.chain(onebit_jax.scale_by_onebit_adam(warmup=2000, axis_name="data"), '
                "optax.add_decayed_weights(0.01), rate)",
                "The same as `onebit_adam(weight_decay=0.01)`.",
            ),
            Works(
                "optax.chain(onebit, optax.contrib.reduce_on_plateau(patience=2))",
                "Call `step(..., value=loss)`; an earlier step's loss costs no waiting.",
                takes_value=True,
            ),
            Works(
                "optax.contrib.schedule_free(onebit, 1e-3)",
                "Evaluate with `optax.contrib.schedule_free_eval_params(opt_state, params)`.",
            ),
            Works(
                "optax.contrib.schedule_free(optax.chain(mean, optax.sgd(1e-2)), 1e-2)",
                "The dense form: the mean stands within.",
            ),
            Refused(
                "optax.contrib.mechanize(onebit)",
                "It learns the rate from each worker's own gradients: put it behind the mean.",
                LATER,
            ),
            Works(
                "optax.chain(mean, optax.contrib.mechanize(adamw, s_init=0.1))",
                "All workers learn the same rate.",
            ),
        ],
    ),
    Section(
        "Different parameters, different optimizers",
        [
            Works(
                'optax.partition({"matrices": onebit, "vectors": optax.chain(mean, adamw)}, '
                "labels)",
                "Norms and biases dense: [your-own-loop.md](your-own-loop.md).",
            ),
            Refused(
                'optax.partition({"matrices": onebit, "vectors": adamw}, labels)',
                "Nothing averages the vectors' gradients: put `mean` before `adamw`.",
                r"would differ between workers|differ between workers: nothing averages",
            ),
            Works(
                'optax.partition({"matrices": optax.chain(bits, optax.contrib.muon(1e-2)), '
                '"vectors": optax.chain(mean, adamw)}, labels)',
                "Muon of what was received.",
            ),
            Works(
                'optax.partition({"matrices": optax.chain(mean, optax.contrib.muon(1e-2)), '
                '"vectors": onebit}, labels)',
                "Muon on the exact mean.",
            ),
            Works(
                'optax.partition({"matrices": onebit, "vectors": optax.set_to_zero()}, labels)',
                "Frozen parameters are not exchanged.",
            ),
            Works(
                "optax.selective_transform(onebit, freeze_mask=vectors)",
                "The same, by a mask.",
            ),
            Works(
                "optax.chain(onebit, optax.freeze(vectors))",
                "Works, but exchanges what it then throws away.",
            ),
            Refused(
                "optax.masked(onebit, matrices)",
                "It passes other parameters' gradients through, each worker's own: take "
                "`optax.partition`.",
                r"\['bias'\], differ between workers.*optax.masked passes.*optax.partition",
            ),
            Works(
                "optax.chain(mean, optax.masked(optax.add_decayed_weights(0.01), matrices), adamw)",
                "Behind an exchange a mask is harmless.",
            ),
            Works(
                "optax.flatten(onebit)",
                "One scale for all tensors, where each had its own; one exchange carries them all "
                "in either case.",
            ),
        ],
    ),
    Section(
        "Conditions",
        [
            Refused(
                "optax.apply_if_finite(onebit, 3)",
                "A worker whose own gradient overflows would leave the exchange out, and the "
                "others wait forever: take `skip_nonfinite`.",
                r"wait for each other for ?ever.*onebit_jax.skip_nonfinite\(tx, axis\)",
            ),
            Works(
                'onebit_jax.skip_nonfinite(onebit, "data")',
                "All leave the update out together: [reliability.md](reliability.md). `train_step` "
                "does so by itself.",
            ),
            Works(
                "optax.chain(mean, optax.apply_if_finite(adamw, 3))",
                "Behind the mean all workers decide alike.",
            ),
            Refused(
                "optax.conditionally_transform(onebit, lambda step: step % 2 == 0)",
                "Where the condition is false it passes each worker's own gradients on.",
                r"the updates of 2 parameters.*differ between workers",
            ),
            Works(
                "optax.conditionally_mask(onebit, lambda step: step % 2 == 0)",
                "Leaves out every other gradient, on all workers alike.",
            ),
            Works(
                "optax.chain(onebit, optax.conditionally_transform("
                "optax.scale(0.5), lambda step: step > 5))",
                "Behind an exchange any condition on the step or on updates is the same on all.",
            ),
            Works(
                "optax.chain(onebit, optax.keep_params_nonnegative())",
                "Acts on the step that all take.",
            ),
        ],
    ),
    Section(
        "Wrappers with parameters of their own",
        [
            Refused(
                "optax.lookahead(onebit, 5, 0.5)",
                "It needs gradients of `params.fast` alone, where a step has those of all "
                "parameters: take `on_fast`, as in the next row.",
                r"optax.lookahead.*params\.fast",
            ),
            Works(
                "on_fast(optax.lookahead(onebit, 5, 0.5))",
                "With `on_fast` from above, parameters `optax.LookaheadParams.init_synced(params)` "
                "and a `loss_fn` of `params.fast`. Not with `reset_state`: every reset would begin "
                "a new warm-up.",
            ),
            Refused(
                "optax.contrib.sam(onebit, optax.sgd(0.05))",
                "Its update does not take the `phase` that a step passes, and its ascent would "
                "follow each worker's own gradients.",
                r"does not take 'phase'.*optax.GradientTransformation\(tx.init, tx.update\)",
            ),
            Refused(
                "optax.GradientTransformation(*optax.contrib.sam(onebit, optax.sgd(0.05)))",
                "The ascent would follow each worker's own gradients.",
                r"differ between workers",
            ),
            Works(
                "optax.chain(mean, optax.GradientTransformation("
                "*optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))))",
                "Dense: ascent and descent on the mean gradient.",
            ),
        ],
    ),
    Section(
        "Composition and what is measured",
        [
            Works(
                'optax.named_chain(("clip", optax.clip(1.0)), '
                '("onebit", optax.with_extra_args_support(onebit)))',
                "As `chain`; `with_extra_args_support` changes nothing.",
            ),
            Refused(
                'optax.chain(optax.snapshot("norm", optax.tree.norm), onebit)',
                "A norm of each worker's own gradients: `train_step(..., grad_norm_every=n)` "
                "reports that of all, or wrap it in `per_worker`.",
                LATER,
            ),
            Works(
                'optax.chain(onebit, optax.snapshot("norm", optax.tree.norm))',
                "The norm of the step.",
            ),
            Refused(
                'optax.chain(onebit, optax.monitor({"norm": optax.tree.norm}))',
                "Its state has measurements from the first update on only, so that no step can "
                "be compiled for it: take `optax.snapshot`.",
                r"returns a state of another structure than init",
            ),
            Refused(
                "adamw",
                "Nothing averages the gradients: put `mean` before it.",
                r"would differ between workers.*onebit_jax.mean_gradients\('data'\) before it",
            ),
            Refused(
                "optax.sgd(1e-2)",
                "The same.",
                r"the updates of 2 parameters.*nothing averages",
            ),
            Works(
                "optax.chain(mean, onebit)",
                "Sends all gradients at full precision, then bits of their mean: leave out `mean`.",
            ),
            Refused(
                "onebit_jax.per_worker(onebit)",
                "It marks what is a worker's own by itself.",
                r"per_worker was given an optimizer that marks each worker's state itself",
            ),
        ],
    ),
]
CASES = [case for section in SECTIONS for case in section.cases]


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
    return code.replace("warmup=2000", f"warmup={WARMUP}, b2={B2}")


def task(code: str) -> tuple[Any, Any]:
    """The parameters and the loss, which of lookahead are its own."""
    if "lookahead" not in code:
        return make_params(), loss_fn
    pair = optax.LookaheadParams.init_synced(make_params())
    return pair, lambda params, batch: loss_fn(params.fast, batch)


def trained(step, state, batches, takes_value):
    """Goes on; `value` is the loss of the step before."""
    value, losses = jax.numpy.float32(1), []
    for batch in batches:
        extra = {"value": value} if takes_value else {}
        *state, metrics = step(*state, batch, **extra)
        losses.append(float(metrics["loss"]))
        value = metrics["loss"]
    return tuple(state), losses


def assert_replicas_agree(state):
    """On all devices the same bits, but for what is marked as each worker's own."""
    shared = jax.tree.map(
        lambda node: None if is_per_worker(node) else node, state, is_leaf=is_per_worker
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(numbers(shared)):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(others) == MESH.size - 1
        for other in others:
            assert other.tobytes() == first.tobytes(), jax.tree_util.keystr(path)


def numbers(tree):
    """Random keys as what they are made of."""
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def of_kind(kind):
    return [pytest.param(case, id=case.code) for case in CASES if isinstance(case, kind)]


def some_fast(params):
    """A fifth of them, and the others among the slow tests."""
    return [
        param
        if place % 5 == 0
        else pytest.param(*param.values, id=param.id, marks=pytest.mark.slow)
        for place, param in enumerate(params)
    ]


@pytest.mark.parametrize("case", some_fast(of_kind(Works)))
def test_works(case, tmp_path):
    """Through the end of warm-up, and through a checkpoint in the middle of the run."""
    tx, (params, loss) = made(case.code), task(case.code)
    step = onebit_jax.train_step(loss, tx, MESH)
    go_on = functools.partial(trained, step, takes_value=case.takes_value)
    params = jax.device_put(params, NamedSharding(MESH, P()))
    start = params, onebit_jax.init(tx, params, MESH)
    target = abstract(start)
    batches = make_batches(1) * STEPS
    middle, before = go_on(start, batches[:SAVED_AFTER])
    ocp.save(tmp_path / "checkpoint", middle)
    end, after = go_on(middle, batches[SAVED_AFTER:])
    assert after[-1] < before[0]
    assert_replicas_agree(end)

    restored = ocp.load(tmp_path / "checkpoint", target)
    resumed, _ = go_on(restored, batches[SAVED_AFTER:])
    assert_equal(numbers(resumed), numbers(end))


@pytest.mark.parametrize("case", of_kind(Refused))
def test_refused(case):
    params, _ = task(case.code)
    with pytest.raises(ValueError, match=re.compile(case.words, re.DOTALL)):
        onebit_jax.init(made(case.code), params, MESH)


def table() -> str:
    """The table of the docs, of all cases."""
    lines = []
    for section in SECTIONS:
        lines += [f"## {section.title}", "", "| optimizer | | |", "| --- | --- | --- |"]
        for case in section.cases:
            verdict = "works" if isinstance(case, Works) else "refused"
            lines.append(f"| `{case.code}` | {verdict} | {case.note} |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_has_this_table():
    assert table() in PAGE.read_text(), "run python -m tests.test_wrappers"
    assert not any("|" in text for case in CASES for text in (case.code, case.note))


if __name__ == "__main__":
    text = PAGE.read_text()
    head = text[: text.index("\n## ") + 1]
    PAGE.write_text(head + table())
