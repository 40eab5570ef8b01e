"""Checkpoints: what comes back, what is refused, and what is done about damage."""

import importlib.metadata
import json
import random
import shutil
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
from onebit_jax.checkpoint import Checkpoints, checksums, manifest
from onebit_jax.checkpoint import checkpoints as checkpoints_module
from onebit_jax.markers import PerWorker, nodes_with

# Where one array cannot be read, Orbax closes its event loop while reads of others still report.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s)Exception ignored in. None.*Event loop is closed"
    ":pytest.PytestUnraisableExceptionWarning"
)


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

    params = {"w": put((5, 7)), "empty": put((0, 3)), "half": put((9,)).astype(jnp.bfloat16)}
    state = (kind(put(()), PerWorker([put((workers, 4000), ("data",))])), optax.EmptyState())
    others = {"key": jax.random.key(seed), "count": seed, "table": np.arange(3) + seed}
    return params, state, others


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if isinstance(x, jax.Array):
            assert (x.dtype, x.sharding) == (y.dtype, y.sharding)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save(folder, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, *make(step), extra={"at": step}, metric=float(abs(step - 2)))


def restore(folder, like=None):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(*(like or make(0)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    save(folder, 1, 2)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def test_everything_comes_back_bit_for_bit(saved):
    restored = restore(saved)
    assert (restored.step, restored.extra) == (2, {"at": 2})
    assert_same(restored[1:4], make(2))
    assert isinstance(restored.opt_state[0], State)


def test_saves_where_no_package_is_installed(tmp_path, monkeypatch):
    # As where checkouts are on PYTHONPATH: a run's first save would end it.
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    save(tmp_path, 1)
    versions = manifest.read(tmp_path / "1" / "manifest" / "manifest.json")["versions"]
    assert versions["onebit_jax"] == onebit_jax.__version__
    assert versions["jax"] == jax.__version__
    assert restore(tmp_path).step == 1


@pytest.mark.parametrize(
    "tx",
    [
        onebit_jax.local_steps(optax.adamw(1e-2), optax.sgd(0.7), every=6, axis_name="data"),
        optax.partition(
            {
                "w": onebit_jax.local_steps(
                    optax.adamw(1e-2), optax.sgd(0.7), every=6, axis_name="data"
                ),
                "b": optax.chain(onebit_jax.mean_gradients("data"), optax.adam(1e-2)),
            },
            {"w": "w", "b": "b"},
        ),
        onebit_jax.zero_one_adam(1e-2, variance_freeze=2, local_step_scaler=4, axis_name="data"),
    ],
    ids=["local_steps", "in partition", "zero_one_adam"],
)
def test_a_save_between_exchanges_has_what_workers_share(tx, tmp_path):
    # Devices' copies of the parameters differ then, though they are declared the same on all.
    mesh = mesh_of(4)
    x = jax.random.normal(jax.random.key(1), (16, 8))

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
            state = step(*state, x)[:2]
            if i >= 19:
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


def test_a_folder_that_is_no_text_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="PYTHONUTF8=1"):
        Checkpoints(f"{tmp_path}/L\udcc3\udca4ufe")


def test_without_a_checkpoint_the_arguments_come_back(tmp_path):
    given = make(0)
    restored = restore(tmp_path / "none", given)
    assert (restored.step, restored.extra) == (0, None)
    assert restored.params is given[0]
    assert not (tmp_path / "none").exists()


def test_the_last_and_the_best_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, keep_last=2, keep_best=1)
    assert Checkpoints(tmp_path).steps() == [2, 4, 5]
    # What an earlier start of the run knew of metrics counts on.
    save(tmp_path, 6, keep_last=1, keep_best=2)
    assert Checkpoints(tmp_path).steps() == [2, 4, 6]


def test_a_save_may_be_followed_at_once_by_a_step_that_donates(tmp_path):
    params, state, others = make(1)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, params, state, others)
        double((params, state))
    assert_same(restore(tmp_path)[1:4], make(1))


@pytest.mark.parametrize(
    ("like", "complaint"),
    [
        (make(0, workers=2), "was saved by 4 workers, this run has 2 workers"),
        (make(0, kind=OtherState), "opt_state/0 is a State there and a OtherState here"),
        ((make(0)[0] | {"b": jnp.zeros(2)}, *make(0)[1:]), "params/b is absent there and has"),
        ((*make(0)[:2], {"key": 3}), "others/count has shape .* there and is absent here"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_read(copied, like, complaint):
    shutil.rmtree(copied / "2" / "state")
    with pytest.raises(ValueError, match=complaint):
        restore(copied, like)


def test_names_in_a_manifest_lead_nowhere(copied):
    path = copied / "2" / "manifest" / "manifest.json"
    content = manifest.read(path)
    content["arrays"]["../../../secret"] = content["arrays"].pop("params/w")
    path.write_text(manifest.encoded(content))
    before = sorted(copied.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"\.\./\.\./\.\./secret has shape .* is absent here"):
        restore(copied)
    assert sorted(copied.parent.rglob("*")) == before


def test_a_plan_is_checked_before_anything_is_read(tmp_path):
    mesh = mesh_of(2)
    params = jax.device_put({"w": jnp.ones(4)}, NamedSharding(mesh, P()))
    optimizers = [
        onebit_jax.local_steps(optax.sgd(0.1), optax.sgd(1.0), every=every, axis_name="data")
        for every in (3, 4)
    ]
    state = onebit_jax.init(optimizers[0], params, mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, params, state._replace(since_sync=state.since_sync + 1))
        with pytest.raises(ValueError, match=r"every=3.*but the optimizer has every=4"):
            checkpoints.restore(params, onebit_jax.init(optimizers[1], params, mesh))


def test_another_number_of_workers_goes_on(tmp_path):
    """What was owed is owed; a resize by hand gives the same, bit for bit."""

    def begin(workers):
        mesh = mesh_of(workers)
        params = jax.device_put({"w": jnp.ones(37)}, NamedSharding(mesh, P()))
        step = onebit_jax.train_step(lambda p, x: jnp.mean((x - p["w"]) ** 2), tx, mesh)
        return step, params, onebit_jax.init(tx, params, mesh)

    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(0.1))
    batch = jax.random.normal(jax.random.key(0), (8, 37))
    step, params, state = begin(4)
    for _ in range(3):
        params, state, _ = step(params, state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, params, state)
        step, fewer, expected = begin(2)
        with pytest.raises(ValueError, match="give restore tx="):
            checkpoints.restore(fewer, expected)
        restored = checkpoints.restore(fewer, expected, tx=tx)
    by_hand = onebit_jax.resize(state, tx, fewer, mesh_of(2), from_axes=mesh_of(4))
    assert_same(restored.opt_state, by_hand)
    assert np.abs(jax.tree.leaves(by_hand[0].exchange.worker)[0]).max() > 0.01
    step(*restored[1:3], batch)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncated(path, rng):
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def flipped(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def removed(path, rng):
    del rng
    path.unlink()


def restore_or_pass_over(folder):
    """Holds what is restored to what was saved, bit for bit; returns the step, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = restore(folder)
    assert_same(restored[1:4], make(restored.step))
    assert restored.extra == {"at": restored.step}
    return restored.step, [str(warning.message) for warning in caught]


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncated, flipped, removed])
def test_no_damage_to_a_file_goes_unnoticed(copied, damage):
    """Each file once: what comes back is what was saved, or the checkpoint before."""
    rng, passed_over = random.Random(0), 0
    for path in files_of(copied / "2"):
        if not path.stat().st_size:
            continue
        whole = path.read_bytes()
        damage(path, rng)
        step, caught = restore_or_pass_over(copied)
        if step == 1:
            assert len(caught) == 1
            assert f"{copied / '2'} is damaged (" in caught[0]
            passed_over += 1
        path.write_bytes(whole)
    assert passed_over >= 3
    assert restore_or_pass_over(copied) == (2, [])


def flip_and_restore(folder, tries):
    """Flips bits of the files with the arrays."""
    rng, passed_over = random.Random(1), 0
    paths = files_of(folder / "2" / "state" / "ocdbt.process_0" / "d")
    for _ in range(tries):
        [path] = rng.choices(paths, [path.stat().st_size for path in paths])
        whole = path.read_bytes()
        flipped(path, rng)
        passed_over += restore_or_pass_over(folder)[0] == 1
        path.write_bytes(whole)
    return passed_over


def kill_and_restore(folder, tries):
    """Saves that died: any of the files, the last of them cut, in Orbax's place or the final one.

    The folders lie as the file system may have them: in any order.
    """
    rng, seen = random.Random(2), set()
    complete = folder / "2"
    kept = complete.rename(folder.parent / "complete")
    files = [path.relative_to(kept) for path in files_of(kept)]
    for _ in range(tries):
        name = rng.choice(["2", "2", "2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-17"])
        written = rng.sample(files, rng.randrange(len(files)))
        for path in written:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept / path, folder / name / path)
        if written and (folder / name / written[-1]).stat().st_size:
            truncated(folder / name / written[-1], rng)
        step, _ = restore_or_pass_over(folder)
        seen.add((name, step))
        shutil.rmtree(folder / name, ignore_errors=True)
    kept.rename(complete)
    return seen


@pytest.mark.slow
def test_a_thousand_killed_saves_and_many_flipped_bits(copied):
    assert ("2", 1) in kill_and_restore(copied, 1000)
    assert flip_and_restore(copied, 250) > 210


def test_a_run_goes_on_past_a_damaged_checkpoint(copied):
    (copied / "2" / "_CHECKPOINT_METADATA").write_text("{")
    shutil.rmtree(copied / "2" / "state")
    (copied / "3.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(copied) as checkpoints:
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(*make(0)).step == 1
        checkpoints.save(2, *make(2), extra={"at": 2})
    assert [path.name for path in sorted(copied.iterdir())] == ["1", "2", "2.damaged"]
    assert restore_or_pass_over(copied) == (2, [])


def test_all_damaged_is_an_error_not_a_new_run(copied):
    for step in "12":
        (copied / step / "manifest" / "manifest.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="manifest.json cannot be read"),
        pytest.raises(ValueError, match=r"no checkpoint in .* can be read, of steps 1, 2"),
    ):
        restore(copied)


def test_a_folder_that_went_away_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, *make(1))
    checkpoints.close()
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "run").write_text("a file where the folder was")
    with pytest.raises(OSError, match="run"):
        checkpoints.save(2, *make(2))


def test_an_error_in_the_loop_waits_for_no_other_process(tmp_path, monkeypatch):
    """Another process that has not failed would never come; what is being saved is saved."""

    def meet(work):
        pytest.fail(f"waits for the others and {work}")

    def train():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, *make(1))
            monkeypatch.setattr(checkpoints_module, "_by_first_process", meet)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    monkeypatch.undo()
    assert_same(restore(tmp_path)[1:4], make(1))


def test_an_error_in_the_loop_names_what_could_not_be_saved(tmp_path, monkeypatch):
    class Failing:
        def result(self, timeout=None):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints_module.ocp, "save_checkpointables_async", lambda *_: Failing())

    def train():
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, *make(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        train()
    [note] = raised.value.__notes__
    assert "could not be written" in note
    assert "No space left on device" in note


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_best": -1}])
def test_numbers_out_of_range(tmp_path, options):
    [name] = options
    with pytest.raises(ValueError, match=f"{name}={options[name]}"):
        Checkpoints(tmp_path, **options)


def test_checksums_of_parts():
    mesh = mesh_of(4)
    x = jax.device_put(np.arange(12.0).reshape(4, 3), NamedSharding(mesh, P("data")))
    sums = checksums.checksums(x)
    assert list(sums) == [f"{i}:{i + 1},0:3" for i in range(4)]
    whole = jax.device_put(x, NamedSharding(mesh, P()))
    assert checksums.differing(whole, sums) == []
    assert checksums.differing(whole.at[2, 1].add(1e-6), sums) == ["2:3,0:3"]
    assert list(checksums.checksums(whole)) == ["0:4,0:3"]
    assert checksums.checksums(jax.random.key(1)) != checksums.checksums(jax.random.key(2))


def test_checksums_of_parts_that_are_split_finer_or_otherwise():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    mesh = jax.sharding.Mesh(mesh.devices, ("a", "b"))
    x = np.arange(24.0).reshape(4, 6)
    for before, after in ((P(), P("a")), (P("a"), P(None, "b")), (P("a", "b"), P("b", "a"))):
        sums = checksums.checksums(jax.device_put(x, NamedSharding(mesh, before)))
        now = jax.device_put(x, NamedSharding(mesh, after))
        assert checksums.differing(now, sums) == []
        changed = jax.device_put(x + 1e-6 * (x == 9), NamedSharding(mesh, after))
        assert len(checksums.differing(changed, sums)) == 1


def test_a_manifest_knows_of_every_change(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(manifest.encoded({"a": [1, 2.5, None, "ü"]}))
    whole = path.read_bytes()
    assert manifest.read(path) == {"a": [1, 2.5, None, "ü"]}
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        with pytest.raises(manifest.DamagedError):
            manifest.read(path)
    content = json.loads(whole)
    content["content"]["a"][0] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(manifest.DamagedError, match="is not what was written"):
        manifest.read(path)
