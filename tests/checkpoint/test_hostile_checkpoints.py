"""`Checkpoints` used as nobody should, but somebody will: nothing that was saved is lost."""

import functools
import json
import shutil
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.checkpoint import Checkpoints, manifest

PARAMS, STATE = {"w": np.arange(4, dtype=np.float32)}, {}


def save(folder, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, PARAMS, STATE)


def restore(folder, others=None):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(PARAMS, STATE, others)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# What a save is given


DEEP, CIRCLE = functools.reduce(lambda x, _: [x], range(100_000), []), []
CIRCLE.append(CIRCLE)
CHANGED = [{9: 1, 10: 2}, {"a": [{1.5: 0}]}, {"a": ({None: 0},)}, {1, 2}, {1.5: np.zeros(2)}]


@pytest.mark.parametrize("extra", [*CHANGED, DEEP, CIRCLE], ids=range(7))
def test_an_extra_that_json_would_change_is_refused(tmp_path, extra):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"^extra is not what JSON can hold"):
            checkpoints.save(1, PARAMS, STATE, extra=extra)
        checkpoints.save(1, PARAMS, STATE, extra={"9": 1, "10": [2.5, None, float("inf")]})
    assert restore(tmp_path).extra == {"9": 1, "10": [2.5, None, float("inf")]}


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, np.int64])
def test_steps_and_metrics_may_be_scalars_of_any_kind(tmp_path, kind):
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        steps: Any = ((1, 3), (np.int64(2), 1), (jnp.int32(3), 2))
        for step, metric in steps:
            checkpoints.save(step, PARAMS, STATE, metric=kind(metric))
    assert Checkpoints(tmp_path).steps() == [2, 3]
    assert restore(tmp_path).step == 3


@pytest.mark.parametrize("metric", ["0.5", 1j, True, [1.0], np.ones(2)])
def test_a_metric_that_is_no_number_is_named(tmp_path, metric):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"^metric="):
        checkpoints.save(1, PARAMS, STATE, metric=metric)


def test_others_of_scalars_come_back_as_they_were(tmp_path):
    others = {"a": np.float32(3), "b": np.int64(2), "c": True, "d": 2.5, "e": np.bool(True)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, PARAMS, STATE, others)
    restored = restore(tmp_path, jax.tree.map(lambda x: type(x)(0), others)).others
    assert restored == others
    assert {k: type(v) for k, v in restored.items()} == {k: type(v) for k, v in others.items()}


@pytest.mark.parametrize("text", ["text", "float32", np.array(["text"]), 1j])
def test_others_of_text_are_named(tmp_path, text):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"^others/a/0 is .*give it as extra"):
            checkpoints.save(1, PARAMS, STATE, {"a": [text]})
        with pytest.raises(ValueError, match=r"^others/a/0 is"):
            checkpoints.restore(PARAMS, STATE, {"a": [text]})


# What is kept


def test_a_metric_of_nan_is_never_the_best(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        for step, metric in ((1, 0.5), (2, float("nan")), (3, 2.0), (4, None), (5, 3.0)):
            checkpoints.save(step, PARAMS, STATE, metric=metric)
    assert Checkpoints(tmp_path).steps() == [1, 5]


def test_a_run_that_begins_anew_in_a_folder_of_a_later_one_is_told_so(tmp_path):
    save(tmp_path, 100, 200)
    for step in (10, 199, 200):
        with pytest.raises(ValueError, match=r"checkpoint of step 200 .* call restore first"):
            save(tmp_path, step)
    assert Checkpoints(tmp_path).steps() == [100, 200]
    save(tmp_path, 201)


def test_what_is_not_ours_is_left_alone(tmp_path):
    for name in ("7", "2024"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "photo").write_text("mine")
    (tmp_path / "notes.orbax-checkpoint-tmp").write_text("mine")
    save(tmp_path, 1, 2, 3)
    before = names(tmp_path)
    assert before == ["2", "2024", "3", "7", "notes.orbax-checkpoint-tmp"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(PARAMS, STATE).step == 3
        with pytest.raises(ValueError, match="2024 is in the way, and is no checkpoint"):
            checkpoints.save(2024, PARAMS, STATE)
    assert names(tmp_path) == before
    assert (tmp_path / "2024" / "photo").read_text() == "mine"


@pytest.mark.filterwarnings("ignore:the checkpoint")
def test_another_programs_checkpoints_are_no_reason_to_begin_anew(tmp_path):
    with ocp.training.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save_checkpointables(4, {"params": PARAMS})
    with pytest.raises(ValueError, match="of steps 4: they are damaged, or of an earlier version"):
        restore(tmp_path)
    with pytest.raises(ValueError, match="checkpoint of step 4"):
        save(tmp_path, 1)
    save(tmp_path, 5, 6, keep_last=1)
    assert Checkpoints(tmp_path).steps() == [4, 6]


def test_a_checkpoint_whose_manifest_is_gone_is_not_deleted(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "1" / "manifest" / "manifest.json").unlink()
    save(tmp_path, 2, 3, 4)
    assert Checkpoints(tmp_path).steps() == [1, 3, 4]


def test_what_a_kill_left_of_a_superfluous_checkpoint_is_deleted(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(path):
        (path / "manifest" / "manifest.json").unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        checkpoints = Checkpoints(tmp_path, keep_last=1)
        checkpoints.save(1, PARAMS, STATE)
        # With Python 3.12 and later `save` itself waits here, and raises.
        with pytest.raises(Killed), checkpoints:
            checkpoints.save(2, PARAMS, STATE)
    assert Checkpoints(tmp_path).steps() == [2]
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["3"]


def test_a_save_after_a_block_waits_as_one_before_it_does(tmp_path, monkeypatch):
    """With Python 3.12 and later, where nobody waits for it at the end."""
    monkeypatch.setattr("onebit_jax.checkpoint.checkpoints._ENDS_WITH_PYTHON", False)
    checkpoints = Checkpoints(tmp_path)
    with checkpoints:
        checkpoints.save(1, PARAMS, STATE)
    checkpoints.save(2, PARAMS, STATE)
    assert checkpoints._saving is None


@pytest.mark.parametrize("others", [{"a.b": 1, "a": {"b": 2}}, {"a/b": 1, "a": {"b": 2}}])
def test_two_arrays_of_one_name_are_refused(tmp_path, others):
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"^two arrays would both be saved as 'others.a.b'"),
    ):
        checkpoints.save(1, PARAMS, STATE, others)


def test_a_file_in_a_checkpoints_place(tmp_path):
    save(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "2")
    (tmp_path / "2").write_text("a file")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(PARAMS, STATE).step == 1
        with pytest.raises(ValueError, match="2 is in the way"):
            checkpoints.save(2, PARAMS, STATE)
        checkpoints.save(3, PARAMS, STATE)
    assert restore(tmp_path).step == 3


def test_a_checkpoint_that_is_a_link_is_read_and_never_deleted(tmp_path):
    save(tmp_path / "run", 1, 2)
    (tmp_path / "run" / "2").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "2").symlink_to(tmp_path / "elsewhere")
    assert restore(tmp_path / "run").step == 2
    save(tmp_path / "run", 3, 4, keep_last=1)
    assert names(tmp_path / "run") == ["2", "4"]
    assert (tmp_path / "elsewhere" / "state").is_dir()


_UNCLOSED = """
import sys, jax, jax.numpy as jnp
from onebit_jax.checkpoint import Checkpoints

def save():
    Checkpoints(sys.argv[1]).save(1, {"w": jnp.arange(4.0)}, {})

save()
if len(sys.argv) > 2:
    raise ZeroDivisionError
"""


@pytest.mark.parametrize("ending", [[], ["raise"]])
def test_a_save_that_nobody_waits_for_is_finished_at_exit(tmp_path, ending):
    command = [sys.executable, "-c", _UNCLOSED, str(tmp_path / "run"), *ending]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == bool(ending), done.stderr
    assert restore(tmp_path / "run").step == 1


# What a manifest may hold


def rewrite(folder, change, name="manifest.json"):
    path = folder / "manifest" / name
    path.write_text(manifest.encoded(change(manifest.read(path))))


ODD = {
    "empty": lambda x: {},
    "list": lambda x: [],
    "text": lambda x: "text",
    "no format": lambda x: {k: v for k, v in x.items() if k != "format"},
    "no metric": lambda x: {k: v for k, v in x.items() if k != "metric"},
    "format": lambda x: x | {"format": "1"},
    "processes": lambda x: x | {"processes": "1"},
    "no processes": lambda x: x | {"processes": 0},
    "fewer processes": lambda x: x | {"processes": -1},
    "more processes": lambda x: x | {"processes": 9},
    "axes": lambda x: x | {"axes": 5},
    "an axis": lambda x: x | {"axes": [["data"]]},
    "an empty axis": lambda x: x | {"axes": [["data", 0]]},
    "types": lambda x: x | {"types": None},
    "arrays": lambda x: x | {"arrays": 3},
    "an array": lambda x: x | {"arrays": {"params/w": 3}},
    "a shape": lambda x: x | {"arrays": {"params/w": ["float64", 4]}},
    "plans": lambda x: x | {"plans": []},
    "a plan": lambda x: x | {"plans": {"opt_state": 3}},
    "metric": lambda x: x | {"metric": "low"},
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
def test_an_odd_manifest_is_passed_over(tmp_path, change):
    save(tmp_path, 1, 2)
    rewrite(tmp_path / "2", change)
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        with pytest.warns(UserWarning, match="2 is damaged"):
            assert checkpoints.restore(PARAMS, STATE).step == 1
        checkpoints.save(3, PARAMS, STATE, metric=1.0)
    assert names(tmp_path) == ["2.damaged", "3"]


@pytest.mark.parametrize("content", [3, {"checksums": 5}, {"checksums": {"params/w": 3}}, {}])
def test_an_odd_file_of_a_process_is_passed_over(tmp_path, content):
    save(tmp_path, 1, 2)
    rewrite(tmp_path / "2", lambda _: content, "process-0.json")
    with pytest.warns(UserWarning, match="2 is damaged"):
        assert restore(tmp_path).step == 1
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "2" / "manifest" / "manifest.json").write_text(f'{{"crc32": 1, "content": {deep}}}')
    with pytest.warns(UserWarning, match="2 is damaged"):
        assert restore(tmp_path).step == 1


@pytest.mark.parametrize(
    ("number", "versions"), [(manifest.FORMAT - 1, {"onebit_jax": "0.0.1"}), (99, 3), (99, None)]
)
def test_another_version_is_named_whatever_else_the_manifest_holds(tmp_path, number, versions):
    save(tmp_path, 1)
    rewrite(tmp_path / "1", lambda _: {"format": number, "versions": versions})
    with pytest.raises(
        ValueError, match=rf"has the format {number}, .* reads \d+: it was written by"
    ):
        restore(tmp_path)
    assert json.loads((tmp_path / "1" / "manifest" / "manifest.json").read_text())


def test_numpys_float64_is_not_taken_for_float32(tmp_path):
    save(tmp_path, 1)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=r"params/w has shape \(4,\) and dtype float32 there"),
    ):
        checkpoints.restore({"w": np.zeros(4)}, STATE)


@pytest.mark.parametrize("opt_state", [None, [np.zeros(2)]])
def test_parameters_alone_are_not_restored(tmp_path, opt_state):
    save(tmp_path, 1)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="is of another tree: opt_state"),
    ):
        checkpoints.restore(PARAMS, opt_state)


# What a run goes on with


def onebit(**options):
    return onebit_jax.onebit_adam(1e-3, axis_name="data", warmup=3, **options)


OTHERS = {
    "b1 was 0.9 and is 0.8": {"b1": 0.8},
    "b2 was 0.999 and is 0.9": {"b2": 0.9},
    "bias_correction was True and is False": {"bias_correction": False},
    "scale was 'rms' and is 'mean_abs'": {"exchange": ExchangeOptions(scale="mean_abs")},
}


@pytest.mark.parametrize("told", OTHERS)
def test_other_hyperparameters_are_named_in_a_warning(tmp_path, told):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    state = onebit_jax.init(onebit(), PARAMS, mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, PARAMS, state, tx=onebit())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpoints.restore(PARAMS, state, tx=onebit()).step == 1
            assert checkpoints.restore(PARAMS, state).step == 1
        other = onebit(**OTHERS[told])
        fresh = onebit_jax.init(other, PARAMS, mesh)
        with pytest.warns(UserWarning, match=f"1 was saved with other hyperparameters: .*{told}"):
            assert checkpoints.restore(PARAMS, fresh, tx=other).step == 1
