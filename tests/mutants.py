"""Hand-made faults of the library, and the test that notices each: a script, not a test.

Each mutant is applied to a temporary copy of the repository, in which its tests run until one
fails. A mutant that survives shows a gap: write the test that kills it.

    python -m tests.mutants                 # all, about a minute each
    python -m tests.mutants residual skip   # those whose names contain one of these words
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """A fault: in a file of `onebit_jax` one text in place of another, which occurs once there."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SGD = ("tests/transforms/test_compressed_sgd.py::test_its_forms_agree_with_numpy",)
ADAM = ("tests/transforms/test_onebit_adam.py::test_agrees_with_numpy[refreshes]",)
FROZEN = ("tests/transforms/test_onebit_adam.py::test_agrees_with_numpy[one worker]",)
LAMB = ("tests/transforms/test_onebit_lamb.py::test_agrees_with_numpy[flat]",)
LOCAL = ("tests/transforms/test_local_steps.py::test_groups_follow_numpy",)
SKIP = ("tests/transforms/test_skip_nonfinite.py",)
BEFORE = ("tests/transforms/test_before_an_exchange.py",)

ONE_BIT, K = "collectives/one_bit.py", "collectives/k_bits.py"
EXCHANGE, LAYOUT = "collectives/exchange.py", "collectives/layout.py"
ADAM_FILE, FREEZE = "transforms/onebit_adam.py", "transforms/frozen_variance.py"

MUTANTS = [
    # Error feedback.
    Mutant(
        "a worker drops its residual",
        ONE_BIT,
        "made = values[place] + self.residual_decay * e",
        "made = values[place] + 0.0 * e",
        SGD,
    ),
    Mutant(
        "a server drops its residual",
        ONE_BIT,
        "total = _add_signs(self.residual_decay * residual(last, S), sent, scales)",
        "total = _add_signs(0.0 * residual(last, S), sent, scales)",
        SGD,
    ),
    Mutant(
        "the residual has the wrong sign",
        ONE_BIT,
        "return c - lax.select(c >= 0, s, -s)",
        "return lax.select(c >= 0, s, -s) - c",
        SGD,
    ),
    Mutant(
        "a sum in place of the mean of all workers",
        ONE_BIT,
        "by_workers = layout.in_row_order(layout.scales(rows) / len(rows))",
        "by_workers = layout.in_row_order(layout.scales(rows))",
        SGD,
    ),
    Mutant(
        "a sum in place of the mean without a server",
        "contrib/largest_values.py",
        "lax.scan(add, x, rows)[0] / len(rows)",
        "lax.scan(add, x, rows)[0]",
        ("tests/test_contrib.py",),
    ),
    Mutant(
        "a zero is sent as negative",
        ONE_BIT,
        "sections = layout.packed([x >= 0 for x in pieces])",
        "sections = layout.packed([x > 0 for x in pieces])",
        ("tests/collectives/test_one_bit.py",),
    ),
    Mutant(
        "inactive elements and padding count in the scale",
        ONE_BIT,
        "mean = found / jnp.maximum(counts, 1)",
        "mean = found / jnp.maximum(counts, counts.max())",
        SGD,
    ),
    Mutant(
        "inactive elements get residuals",
        ONE_BIT,
        "made = jnp.where(on, made, 0.0)",
        "made = jnp.where(True, made, 0.0)",
        ADAM,
    ),
    Mutant(
        "the scale of another tensor tells which one is not finite",
        LAYOUT,
        "self._by_piece = np.arange(scales) if self._joined else np.argsort(np.argsort(heads))",
        "self._by_piece = np.arange(scales)",
        ("tests/collectives/test_exchange.py",),
    ),
    Mutant(
        "a worker at a few bits drops its residual",
        K,
        "made = z[place] + self.residual_decay * e",
        "made = z[place] + 0.0 * e",
        ("tests/transforms/test_local_steps.py::test_no_group_loses_anything",),
    ),
    # 1-bit Adam and LAMB.
    Mutant(
        "a warm-up step keeps the variance that it changes",
        ADAM_FILE,
        'return ("v_then_inverse_root",) if phase == "compression" else ()',
        'return ("v_then_inverse_root",) if phase else ()',
        (
            "tests/test_training.py::test_a_jitted_loop_over_a_change_of_phase_agrees_with_calls_to_rounding",
        ),
    ),
    Mutant(
        "the variance freezes one update late",
        "transforms/schedules.py",
        "    return t >= warmup\n",
        "    return t > warmup\n",
        FROZEN,
    ),
    Mutant(
        "the momentum at the freeze is not decayed",
        FREEZE,
        "lambda x: (decay * x.astype(jnp.float32)).astype(x.dtype), momentum.m_then_compensated",
        "lambda x: x, momentum.m_then_compensated",
        FROZEN,
    ),
    Mutant(
        "the frozen variance is not corrected",
        ADAM_FILE,
        "lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v / of_v) + self.eps), 0.0),",
        "lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v) + self.eps), 0.0),",
        FROZEN,
    ),
    Mutant(
        "an element awoken by a refresh stays inactive",
        ADAM_FILE,
        "return jnp.where(was | (g != 0), 1 / (jnp.sqrt(v) + self.eps), 0.0)",
        "return jnp.where(was, 1 / (jnp.sqrt(v) + self.eps), 0.0)",
        ADAM,
    ),
    Mutant(
        "steps have no bound",
        ADAM_FILE,
        "return u if bound is None else jnp.clip(u, -bound, bound)",
        "return u",
        ADAM,
    ),
    Mutant(
        "LAMB's frozen coefficient is not used",
        "transforms/onebit_lamb.py",
        "return Made(state, times(jnp.where(running > 0, running, 1.0), u), unfit)",
        "return Made(state, u, unfit)",
        LAMB,
    ),
    # 0/1 Adam, sign methods, local steps.
    Mutant(
        "a sync leaves each worker's momentum",
        "transforms/zero_one_adam.py",
        "m=as_own(jax.tree.map(lambda b: b * per_rate, B)),",
        "m=as_own(jax.tree.map(lambda b: b * per_rate, B_i)),",
        ("tests/transforms/test_zero_one_adam.py::test_agrees_with_numpy[5-0]",),
    ),
    Mutant(
        "votes on zeros do not take turns",
        "collectives/votes.py",
        "zero_is_positive = (call + lax.axis_index(layout.axes.node)) % 2 == 0",
        "zero_is_positive = call % 1 == 0",
        ("tests/transforms/test_signs.py",),
    ),
    Mutant(
        "all workers draw the same random signs",
        "collectives/random_signs.py",
        "return jax.random.bits(jax.random.fold_in(key, which), (2,), jnp.uint32)",
        "return jax.random.bits(key, (2,), jnp.uint32)",
        ("tests/transforms/test_birder.py::test_agrees_with_numpy[flat]",),
    ),
    Mutant(
        "an outer step sends the distance with the wrong sign",
        "transforms/local_steps.py",
        "D = jax.tree.map(lambda x, y: x - y, x, own)",
        "D = jax.tree.map(lambda x, y: y - x, x, own)",
        LOCAL,
    ),
    Mutant(
        "a step taken during a delayed exchange is lost",
        "transforms/local_steps.py",
        "met = jax.tree.map(jnp.add, shared, fragments.group(steps, group))",
        "met = jax.tree.map(lambda x, _: x, shared, fragments.group(steps, group))",
        LOCAL,
    ),
    # Skipped steps, other workers, bytes.
    Mutant(
        "a skipped step does not restore residuals",
        "transforms/skip_nonfinite.py",
        'new = restored_if(~health.fit, new, state, extra_args.get("phase"), axes.names)',
        "new = new",
        SKIP,
    ),
    Mutant(
        "each worker decides alone to skip",
        "transforms/skip_nonfinite.py",
        "causes = lax.psum(jnp.where(mine, unfit, 0), axes.names)",
        "causes = jnp.where(mine, unfit, 0)",
        SKIP,
    ),
    Mutant(
        "a square that overflows passes", EXCHANGE, "_LARGEST = 2.0**40", "_LARGEST = 3e38", SKIP
    ),
    Mutant(
        "resize loses the servers' residuals",
        "collectives/resuming.py",
        "    if E:\n",
        "    if E and False:\n",
        ("tests/test_resizing.py::test_a_compressed_mean_loses_nothing_between_any_sizes",),
    ),
    Mutant(
        "a worker's momentum is not marked PerWorker",
        "transforms/ef_signsgd.py",
        "return EfSignsgdState(algorithm.begin(), as_own(m), self.exchange.over(params).begin())",
        "return EfSignsgdState(algorithm.begin(), m, self.exchange.over(params).begin())",
        ("tests/transforms/test_compressed_sgd.py::test_ef_signsgd_agrees_with_numpy",),
    ),
    Mutant(
        "per_worker marks nothing",
        "transforms/before_an_exchange.py",
        "return as_own(state)",
        "return PerWorker(state)",
        BEFORE,
    ),
    Mutant(
        "each worker clips by its own norm",
        "transforms/before_an_exchange.py",
        "squared = lax.pmean(squared_norm(updates, axes, param_specs), axes.names)",
        "squared = squared_norm(updates, axes, param_specs)",
        BEFORE,
    ),
    Mutant(
        "warm-up sends float32 in place of a few bits",
        ADAM_FILE,
        '"gradient_exchange": None if bits == 32 else exchange.at_bits(axis_name, bits, None),',
        '"gradient_exchange": None,',
        ("tests/transforms/test_programs.py::test_what_an_update_sends",),
    ),
    Mutant(
        "variance_stable takes a growing variance for stable",
        "transforms/schedules.py",
        "small = (growth <= 1 / bound) & (shrinkage >= least_shrinkage(bound)) & any_before",
        "small = (shrinkage >= least_shrinkage(bound)) & any_before",
        ("tests/transforms/test_warmup.py",),
    ),
]


def killer(mutant: Mutant) -> str:
    """The test that fails with this mutant, or what else came of it."""
    source = (ROOT / "onebit_jax" / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        return f"NOT APPLIED: its text occurs {source.count(mutant.old)} times"
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("onebit_jax", "tests", "train"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "onebit_jax" / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "--tb=line"]
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", *mutant.tests],
            cwd=copy,
            # Short tests compile for longer than they compute.
            env={"PYTHONPATH": folder, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
            capture_output=True,
            text=True,
        )
    if run.returncode == 0:
        return "SURVIVES"
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return failed[0] if failed and run.returncode == 1 else f"NOT RUN: {run.stdout[-500:]}"


def main(*words: str) -> None:
    """Runs the mutants whose names contain one of the words, all by default."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    for mutant in chosen:
        print(f"{mutant.name}: {killer(mutant)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
