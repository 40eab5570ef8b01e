"""Checkpoints: what comes back, what is refused, and what is done about damage."""

import gc
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import checkpoint
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.markers import PerWorker, nodes_with

PARAMS, STATE = {"w": np.arange(4, dtype=np.float32)}, {}


class State(NamedTuple):
    count: Any
    residual: PerWorker


class OtherState(NamedTuple):
    count: Any
    residual: PerWorker


def mesh_of(workers):
    devices = jax.devices()[:workers]
    return jax.make_mesh((workers,), ("data",), devices=devices, axis_types=(AxisType.Auto,))


def make(seed, workers=4, kind: Any = State):
    """Parameters, a state, and other things, all of random bits."""
    mesh, rng = mesh_of(workers), np.random.default_rng(seed)

    def put(shape, spec=()):
        values = rng.standard_normal(shape, np.float32)
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    params = {"w": put((5, 7)), "half": put((9,)).astype(jnp.bfloat16)}
    state = (kind(put(()), PerWorker([put((workers, 4000), ("data",))])), optax.EmptyState())
    others = {"key": jax.random.key(seed), "count": seed, "table": {"x": np.arange(3) + seed}}
    return params, state, others


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if isinstance(x, jax.Array):
            assert x.dtype == y.dtype
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save(folder, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            params, state, others = make(step)
            checkpoints.save(step, params, state, extra={"at": step}, **others)


def restore(folder, like=None):
    params, state, others = like or make(0)
    return Checkpoints(folder).restore(params, state, **others)


def restore_or_pass_over(folder):
    """Holds what is restored to what was saved, bit for bit; returns the step, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = restore(folder)
    assert_same(restored[1:4], make(restored.step))
    assert restored.extra == {"at": restored.step}
    return restored.step, [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    save(folder, 1, 2)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# What comes back


def test_everything_comes_back_bit_for_bit(saved):
    assert restore_or_pass_over(saved) == (2, [])
    assert isinstance(restore(saved).opt_state[0], State)


def test_without_a_checkpoint_the_arguments_come_back(tmp_path):
    given = make(0)
    restored = restore(tmp_path / "none", given)
    assert (restored.step, restored.extra) == (0, None)
    assert restored.params is given[0]
    assert not (tmp_path / "none").exists()


def test_the_last_are_kept_and_steps_go_up(tmp_path):
    save(tmp_path, 1, 2, 5, keep_last=2)
    assert Checkpoints(tmp_path).steps() == [2, 5]
    for step in (3, 5):
        with pytest.raises(ValueError, match=rf"step={step}, but .* has .* 5: call restore first"):
            save(tmp_path, step)
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)
    assert Checkpoints(tmp_path).steps() == [2, 5]


def test_a_save_may_be_followed_at_once_by_a_step_that_donates(tmp_path):
    params, state, others = make(1)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    extra = {"at": 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, params, state, extra=extra, **others)
        double((params, state))
        extra["at"] = 3
    assert restore_or_pass_over(tmp_path) == (1, [])


def test_a_save_outside_a_block_is_complete_when_it_returns(tmp_path):
    """At the end of Python nobody waits for it."""
    checkpoints = Checkpoints(tmp_path)
    step: Any = np.int64(1)
    checkpoints.save(step, PARAMS, STATE)
    assert (tmp_path / "1" / "checksums.json").exists()
    with checkpoints:
        checkpoints.save(2, PARAMS, STATE)
    checkpoints.save(3, PARAMS, STATE)
    assert (tmp_path / "3" / "checksums.json").exists()


def local_steps():
    return onebit_jax.local_steps(optax.adamw(1e-2), optax.sgd(0.7), every=6, axis_name="data")


def dense():
    return optax.chain(onebit_jax.mean_gradients("data"), optax.adam(1e-2))


@pytest.mark.parametrize(
    "tx",
    [
        local_steps(),
        optax.partition({"w": local_steps(), "b": dense()}, {"w": "w", "b": "b"}),
        onebit_jax.zero_one_adam(
            1e-2, variance_freeze=2, sync_steps=lambda count: count % 4 == 3, axis_name="data"
        ),
    ],
    ids=["local_steps", "in partition", "zero_one_adam"],
)
def test_a_save_between_exchanges_has_what_workers_share(tx, tmp_path):
    # Devices' copies of the parameters differ then, though they are declared the same on all.
    mesh, x = mesh_of(4), jax.random.normal(jax.random.key(1), (16, 8))

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] + params["b"] - x[:, :1]) ** 2)

    def fresh():
        params = {"w": jnp.zeros((8, 16)), "b": jnp.zeros(16)}
        params = jax.device_put(params, NamedSharding(mesh, P()))
        return params, onebit_jax.init(tx, params, mesh)

    step = onebit_jax.train_step(loss_fn, tx, mesh)
    state, ends = fresh(), []
    with Checkpoints(tmp_path, keep_last=30) as checkpoints:
        for i in range(1, 23):
            state = step(state[0], state[1], x)[:2]
            if i >= 20:
                checkpoints.save(i, *state)
    restored = Checkpoints(tmp_path).restore(*fresh())
    assert restored.step == 22
    [node] = nodes_with("synced_parameters", restored.opt_state)
    assert_same(restored.params, node.synced_parameters(restored.params))
    if not nodes_with("worker_parameters", restored.opt_state):
        return
    # Each worker's own are in the state: the run goes on as if it had not been stopped.
    for params, opt_state in (state, restored[1:3]):
        for _ in range(3):
            params, opt_state, _ = step(params, opt_state, x)
        ends.append(opt_state)
    assert_same(*ends)


@pytest.mark.parametrize(
    ("before", "after"),
    [(4, 2), (1, 4), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 3), (3, 1)))],
)
def test_another_number_of_workers_goes_on(before, after, tmp_path):
    """What was owed is owed; a resize by hand gives the same, bit for bit."""

    def begin(workers):
        mesh = mesh_of(workers)
        params = jax.device_put({"w": jnp.ones(37)}, NamedSharding(mesh, P()))
        step = onebit_jax.train_step(lambda p, x: jnp.mean((x - p["w"]) ** 2), tx, mesh)
        return step, params, onebit_jax.init(tx, params, mesh)

    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(0.1))
    batch = jax.random.normal(jax.random.key(0), (12, 37))
    step, params, state = begin(before)
    for _ in range(3):
        params, state, _ = step(params, state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, params, state)
        step, fewer, expected = begin(after)
        with pytest.raises(ValueError, match=r"mesh of the workers is .* give restore tx="):
            checkpoints.restore(fewer, expected)
        restored = checkpoints.restore(fewer, expected, tx=tx)
    by_hand = onebit_jax.resize(state, tx, fewer, mesh_of(after), from_axes=mesh_of(before))
    assert_same(restored.opt_state, by_hand)
    step(*restored[1:3], batch)


# What is refused


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        (make(0, workers=2), r"workers is \[\['data', 4\]\] there and \[\['data', 2\]\] here"),
        (make(0, kind=OtherState), r"opt_state is .*'State', .* there and .*'OtherState'"),
        ((make(0)[0] | {"b": jnp.zeros(2)}, *make(0)[1:]), r"params\.b is absent there and \['f"),
        ((make(0)[0] | {"w": np.zeros((5, 7))}, *make(0)[1:]), r"'float32', .* and \['float64', "),
        (
            (*make(0)[:2], make(0)[2] | {"key": 3}),
            r"key is \['key<fry>', \[\]\] there and \['int', \[\]\] here",
        ),
    ],
)
def test_what_does_not_fit_is_named(saved, like, complaint):
    with pytest.raises(ValueError, match=rf"saved0/run/2 is of another run: .*{complaint}"):
        restore(saved, like)


def test_two_arrays_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"two arrays would be saved as a\.b\.c"):
        Checkpoints(tmp_path).save(1, PARAMS, STATE, a={"b.c": 1, "b": {"c": 2}})


def test_another_format_is_named_with_the_way_on(copied, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 13)
    with pytest.raises(
        ValueError, match=r"format is 12 there and 13 .* versions .*'0\..*\['params'"
    ):
        restore(copied)
    (copied / "2" / "manifest").mkdir()
    with pytest.raises(ValueError, match=r"the format is 11 or earlier there and 13 here"):
        restore(copied)


# Damage


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncated(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flipped(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def removed(path, rng):
    path.unlink()


def damage_and_restore(folder, path, damage, rng):
    """The step that is restored; 1 if the damage was found, which a warning names."""
    whole = path.read_bytes()
    damage(path, rng)
    step, caught = restore_or_pass_over(folder)
    path.write_bytes(whole)
    told = f"{folder / '2'} is damaged; the one before is used: "
    assert [told in warned for warned in caught] == [True] * (2 - step)
    return step


@pytest.mark.parametrize("damage", [truncated, flipped, removed])
def test_damage_is_found(copied, damage):
    rng = random.Random(0)
    data = copied / "2" / "state" / "ocdbt.process_0" / "d"
    for path in [max(files_of(data), key=lambda x: x.stat().st_size), *files_of(copied / "2/run")]:
        if path.stat().st_size:
            assert damage_and_restore(copied, path, damage, rng) == 1
    assert restore_or_pass_over(copied) == (2, [])


@pytest.mark.slow
def test_no_damage_goes_unnoticed(copied):
    """Every file in every way, and many bits, more of them in larger files."""
    rng, found = random.Random(0), 0
    paths = [path for path in files_of(copied / "2") if path.stat().st_size]
    flips = rng.choices(paths, [path.stat().st_size for path in paths], k=100)
    for damage in (truncated, flipped, removed):
        for path in (*paths, *flips) if damage is flipped else paths:
            # Orbax has the time in the two files beside `state` and `run`.
            found += damage_and_restore(copied, path, damage, rng) == 1
    assert found >= 3 * (len(paths) - 2) + 90


def test_a_run_goes_on_past_a_damaged_checkpoint(copied):
    shutil.rmtree(copied / "2" / "state")
    (copied / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(copied) as checkpoints:
        params, state, others = make(0)
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(params, state, **others).step == 1
        params, state, others = make(2)
        checkpoints.save(2, params, state, extra={"at": 2}, **others)
    assert [path.name for path in sorted(copied.iterdir())] == ["1", "2", "2.damaged"]
    assert restore_or_pass_over(copied) == (2, [])


def test_all_damaged_is_an_error_not_a_new_run(copied):
    for step in "12":
        (copied / step / "checksums.json").write_text("{}")
        shutil.rmtree(copied / step / "run")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(ValueError, match=r"no checkpoint in .* can be read, of steps \[1, 2\]"),
    ):
        restore(copied)


@pytest.fixture
def full_disk():
    """Files cannot grow past 30 kB, which Python is told by an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Orbax leaves coroutines of the failed save to Python, which complains when it finds them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, full_disk):
    save(tmp_path, 1, keep_last=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full_disk()
    with pytest.raises(OSError, match=r"cannot write a checkpoint into"):
        save(tmp_path, 2, 3, keep_last=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert restore_or_pass_over(tmp_path) == (1, [])
    save(tmp_path, 2, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    gc.collect()  # here, not in the next test


_SAVES = """
import sys, jax
jax.config.update("jax_num_cpu_devices", 4)
from tests.checkpoint.test_checkpoints import save
save(sys.argv[1], *range(int(sys.argv[2]), 10_000))
"""


@pytest.mark.slow
def test_killed_saves(tmp_path):
    """Each kill comes at another moment of a save; what is restored is whole."""
    rng, last = random.Random(0), 0
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", _SAVES, str(tmp_path), str(last + 1)])
        while max(Checkpoints(tmp_path).steps(), default=0) < last + 2:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(2 * rng.random())
        process.kill()
        assert process.wait() == -signal.SIGKILL
        step, caught = restore_or_pass_over(tmp_path)
        assert step >= last + 2
        assert caught == []
        last = step
