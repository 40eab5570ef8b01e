"""Which phase a step runs, and what one that is refused leaves as it was."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.training.phase_choice import PhaseChoice
from onebit_jax.transforms.phases import Phase, Progress

WARMUP, COMPRESSION, UNKNOWN = 0, 1, -1


def at(count: int, *upcoming: int) -> Progress:
    """An account with arrays of its own, as every step returns."""
    account: list[Any] = [np.int32(count), np.int32(-1), np.int32(0), np.array(upcoming, np.int32)]
    return Progress(*account)


class Outlook:
    """What a step tells; notes when it is read, that is waited for."""

    def __init__(self, name: str, log: list[str], *rows: list[int]):
        self._name, self._log, self._rows = name, log, rows

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del dtype, copy
        self._log.append(self._name)
        return np.array(self._rows, np.int32).reshape(-1, 4)


class Run:
    """A loop on the host, whose steps tell what they are asked to."""

    def __init__(self, *states: Progress):
        self.states: Any = states
        self.choice = PhaseChoice()
        self.log: list[str] = []
        self.steps = 0

    def step(self, *then: Progress, given: Phase | None = None, refused: bool = False):
        """The phase of a step, and which outlooks it waited for; the states are then others."""
        self.log.clear()
        phase = self.choice.choose(self.states, given)
        self.steps += 1
        self.states = then
        rows = [[refused, x.count, *x.upcoming] for x in then]
        outlook: Any = Outlook(f"step {self.steps}", self.log, *rows)
        self.choice.observe(then, outlook, phase)
        return phase, list(self.log)


def test_steps_wait_for_the_last_but_one_and_for_the_last_only_where_phases_change():
    run = Run(at(0, WARMUP, WARMUP))
    assert run.step(at(1, WARMUP, WARMUP)) == ("warmup", [])
    assert run.step(at(2, WARMUP, WARMUP)) == ("warmup", ["step 1"])
    assert run.step(at(3, WARMUP, COMPRESSION)) == ("warmup", ["step 1"])
    assert run.step(at(4, COMPRESSION, COMPRESSION)) == ("warmup", ["step 2"])
    assert run.step(at(5, COMPRESSION, COMPRESSION)) == ("compression", ["step 3", "step 4"])
    assert run.step(at(6, COMPRESSION, COMPRESSION)) == ("compression", ["step 4"])


def test_a_wrapper_may_pass_over_updates():
    run = Run(at(0, WARMUP, COMPRESSION))
    assert run.step(at(0, WARMUP, COMPRESSION))[0] == "warmup"
    assert run.step(at(0, WARMUP, COMPRESSION))[0] == "warmup"
    assert run.step(at(1, COMPRESSION, COMPRESSION))[0] == "warmup"
    assert run.step(at(1, COMPRESSION, COMPRESSION))[0] == "compression"


def test_where_warm_up_may_end_at_any_update_steps_wait_for_the_last():
    run = Run(at(9, WARMUP, UNKNOWN))
    for step in (1, 2, 3):
        phase, log = run.step(at(9 + step, WARMUP, UNKNOWN))
        assert phase == "warmup"
        assert log[-1:] == [f"step {step - 1}"][: step - 1]
    run.step(at(13, COMPRESSION, COMPRESSION))
    assert run.step(at(14, COMPRESSION, COMPRESSION)) == ("compression", ["step 3", "step 4"])


def test_a_state_that_comes_from_elsewhere_tells_its_own_phase():
    run = Run(at(0, WARMUP, WARMUP))
    run.step(at(1, WARMUP, WARMUP))
    run.step(at(2, WARMUP, WARMUP))
    run.states = (at(80, COMPRESSION, COMPRESSION),)
    assert run.step(at(81, COMPRESSION, COMPRESSION)) == ("compression", [])
    assert run.step(at(82, COMPRESSION, COMPRESSION)) == ("compression", ["step 3"])


def test_optimizers_in_different_phases_have_a_program_of_all():
    run = Run(at(1, WARMUP, WARMUP), at(1, COMPRESSION, COMPRESSION))
    two = at(2, WARMUP, COMPRESSION), at(2, COMPRESSION, COMPRESSION)
    three = at(3, COMPRESSION, COMPRESSION), at(3, COMPRESSION, COMPRESSION)
    assert run.step(*two) == (None, [])
    assert run.step(*three) == (None, ["step 1"])
    assert run.step(*three) == ("compression", ["step 1", "step 2"])


def test_without_phases_there_is_nothing_to_choose_but_the_last_step_but_one_is_waited_for():
    run = Run()
    assert [run.step() for _ in range(3)] == [(None, []), (None, ["step 1"]), (None, ["step 1"])]
    assert run.step(given="warmup") == ("warmup", ["step 2"])


def test_a_refusal_is_raised_once_it_is_known():
    run = Run(at(3, COMPRESSION, COMPRESSION))
    run.step(at(4, COMPRESSION, COMPRESSION))
    run.step(at(4, COMPRESSION, COMPRESSION), given="warmup", refused=True)
    run.step(at(5, COMPRESSION, COMPRESSION))
    with pytest.raises(ValueError, match=r"^phase='warmup' was given, .* update 5 is in 'compress"):
        run.step(at(6, COMPRESSION, COMPRESSION))
    assert run.step(at(6, COMPRESSION, COMPRESSION)) == ("compression", [])


# On devices.


def adam(warmup: int) -> Any:
    return onebit_jax.scale_by_onebit_adam(
        warmup=warmup, axis_name="data", warmup_bits=32, variance_refreshes=None
    )


def loss_fn(params, batch):
    return sum(jnp.sum(p) for p in jax.tree.leaves(params)) * jnp.mean(batch)


PARAMS, BATCH = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, np.ones(4, np.float32)


class Loop:
    """Training on four workers."""

    def __init__(self, tx: Any, **options: Any):
        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        self.step = onebit_jax.train_step(loss_fn, tx, mesh, **options)
        self.params: Any = PARAMS
        self.opt_state = onebit_jax.init(tx, PARAMS, mesh)

    def make(self, phase: Phase | None = None) -> Any:
        """Makes a step; its metrics."""
        self.params, self.opt_state, metrics = self.step(
            self.params, self.opt_state, BATCH, phase=phase
        )
        return jax.device_get(metrics)

    def held(self) -> Any:
        """Parameters and state."""
        return jax.device_get((self.params, self.opt_state))


def assert_untouched(after, before):
    """Parameters and state are those before; but for the phase, which is -1."""
    is_progress = lambda x: isinstance(x, Progress)  # noqa: E731
    for node in jax.tree.leaves(after, is_leaf=is_progress):
        assert not is_progress(node) or node.phase == -1
    forget = functools.partial(
        jax.tree.map, lambda x: x._replace(phase=0) if is_progress(x) else x, is_leaf=is_progress
    )
    jax.tree.map(np.testing.assert_array_equal, forget(after), forget(before))


@pytest.mark.parametrize("max_skipped", [None, 3])
def test_what_is_refused_leaves_the_models_state(max_skipped):
    def counting(params, batch, model_state):
        return jnp.mean((batch @ params) ** 2), {}, {"count": model_state["count"] + 1}

    tx = adam(5)
    params, state = jnp.ones(4), {"count": np.int32(0)}
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(counting, tx, mesh, max_skipped=max_skipped)
    calls: list[tuple[Phase, bool]] = [("warmup", False), ("compression", True)]
    for phase, refused in calls:
        params, opt_state, state, metrics = step(
            params, opt_state, np.ones((8, 4), np.float32), model_state=state, phase=phase
        )
        assert int(state["count"]) == 1
        assert (metrics["phase"] == -1) == refused


def test_what_is_refused_leaves_all_of_a_chain_as_it_was():
    """Here a decay and a momentum of the user's own would move parameters and state."""
    loop = Loop(optax.chain(adam(1), optax.add_decayed_weights(-0.1), optax.trace(0.9)))
    loop.make()
    before = loop.held()
    assert loop.make("warmup")["phase"] == -1
    assert_untouched(loop.held(), before)
    assert loop.make()["phase"] == 1
    before = loop.held()
    with pytest.raises(ValueError, match=r"^phase='warmup' was given, .* update 2 is in 'compress"):
        loop.make()
    jax.tree.map(np.testing.assert_array_equal, loop.held(), before)
    assert loop.make()["phase"] == 1


def test_what_one_of_two_optimizers_refuses_changes_neither():
    optimizers: dict[Any, Any] = {"early": adam(1), "late": adam(2)}
    loop = Loop(optax.partition(optimizers, {"a": "early", "b": "late"}))
    names = [f"{label}/{name}" for label in optimizers for name in ("phase", "frozen_at")]
    assert loop.make().keys() >= {"loss", "skipped", "skipped_in_a_row", *names}
    before = loop.held()
    metrics = loop.make("compression")
    assert (metrics["early/phase"], metrics["late/phase"]) == (-1, -1)
    assert_untouched(loop.held(), before)
    with pytest.raises(ValueError, match=r"^phase='compression' was given, .* 2 is in 'warmup'"):
        loop.make()
    for expected in ((1, 0), (1, 1)):
        metrics = loop.make()
        assert (metrics["early/phase"], metrics["late/phase"]) == expected


def test_a_loop_that_reads_nothing_runs_on():
    """Without a bound on what is queued, JAX's simulated CPU devices abort the process."""
    loop = Loop(optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(1.0)))
    for _ in range(1000):
        loop.params, loop.opt_state, _ = loop.step(loop.params, loop.opt_state, BATCH)
    np.testing.assert_allclose(loop.params["a"], 1 - 1000.0)
