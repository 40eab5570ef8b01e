"""Code of docs/ that no other test runs, as it stands there; links and pictures of all pages."""

import importlib.util
import json
import pathlib
import re
import runpy
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import sharding
from tests.sharded.meshes import assert_replicas_agree
from tests.slices import devices_of_slices
from tests.small_task import MESH, loss_fn, make_batches, make_params
from tests.train.together import free_address
from tests.workers import PAIR

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


devices = jax.devices()


def blocks(page):
    """The Python code of a page."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def execute(code, **names):
    """Runs code with these names; what it leaves."""
    exec(compile(code, "page", "exec"), names)
    return names


def start():
    """What a page takes for granted, with an optimizer that compiles fast."""
    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(1e-2))
    params = jax.tree.map(jnp.asarray, make_params())
    return {
        "jax": jax,
        "jnp": jnp,
        "onebit_jax": onebit_jax,
        "mesh": MESH,
        "tx": tx,
        "loss_fn": loss_fn,
        "params": params,
        "opt_state": onebit_jax.init(tx, params, MESH),
        "step": onebit_jax.train_step(loss_fn, tx, MESH),
    }


class Batches:
    """An iterator with a state, as a data loader is."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __next__(self):
        self.at += 1
        return self.batches[self.at - 1]

    def get_state(self):
        return self.at

    def set_state(self, at):
        self.at = at


def test_the_diff_of_the_readme_trains_on_both_sides():
    readme = (ROOT / "README.md").read_text()
    [diff] = re.findall(r"^```diff\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert len(diff.splitlines()) <= 12

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = names["tx"].update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    for sign in "-+":
        lines = [x[1:] for x in diff.splitlines() if x[0] in (" ", sign)]
        names = {"jax": jax, "optax": optax, "onebit_jax": onebit_jax, "loss_fn": loss_fn}
        names |= {"params": make_params(), "batches": make_batches(1) * 4, "schedule": 1e-2}
        names |= {"train_step": train_step}
        exec("\n".join(lines), names)
        assert names["metrics"]["loss"] < loss_fn(make_params(), names["batch"])


def test_the_default_spelled_out_is_the_default():
    [code] = blocks("how-to-choose.md")
    tx = execute(code, onebit_jax=onebit_jax)["tx"]
    default = onebit_jax.onebit_adam(1e-3, axis_name="data")
    states = [onebit_jax.init(x, make_params(), MESH) for x in (tx, default)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert jax.tree.map(jnp.shape, states[0]) == jax.tree.map(jnp.shape, states[1])


@pytest.mark.slow
def test_the_recipe_for_nodes_of_several_gpus_is_hierarchical():
    code, _ = blocks("clusters.md")
    given = {**start(), "batch": make_batches(1)[0]}
    left = execute(code, **given)
    assert dict(left["mesh"].shape) == {"node": 4, "local": jax.device_count() // 4}
    assert left["mesh"].axis_names == PAIR
    assert left["metrics"]["phase"] == 0


@pytest.mark.slow
def test_a_run_is_saved_and_goes_on_with_another_number_of_workers(tmp_path):
    save, restore, back, caught, skip, watch = blocks("checkpoints.md")
    folder = str(tmp_path / "checkpoints")
    assert "1000 == 0" in save
    save = save.replace('"runs/mine/checkpoints"', repr(folder)).replace("1000 == 0", "2 == 0")
    key = jax.random.key(0)
    given = {**start(), "batches": Batches(make_batches(4)), "steps": 4}
    left = execute(save, **given, key=key)
    with left["Checkpoints"](folder) as checkpoints:
        assert checkpoints.steps() == [2, 4]
        again = start()
        names = execute(restore, **again, key=key, checkpoints=checkpoints)
        assert names["restored"].step == 4
    goes_back_to_adamw(back)
    execute(caught, **start(), batch=make_batches(1)[0])
    wrapped = execute(skip, onebit_jax=onebit_jax)["tx"]
    assert hasattr(onebit_jax.init(wrapped, make_params(), MESH), "skips")
    assert "i % 500" in watch
    execute(watch.replace("i % 500", "i % 2"), **start(), batches=make_batches(2))


def goes_back_to_adamw(code):
    schedule = optax.linear_schedule(0.0, 1e-2, 10)
    tx = onebit_jax.onebit_adam(schedule, warmup=2, axis_name="data")
    [batch] = make_batches(1)
    params = jax.tree.map(jnp.asarray, make_params())
    opt_state, step = onebit_jax.init(tx, params, MESH), onebit_jax.train_step(loss_fn, tx, MESH)
    for _ in range(3):
        params, opt_state, _ = step(params, opt_state, batch)
    names = {**start(), "optax": optax, "np": np, "tx": tx, "schedule": schedule}
    left = execute(code, **{**names, "params": params, "opt_state": opt_state})
    counts = optax.tree.get_all_with_path(left["opt_state"], "count")
    assert {int(count) for _, count in counts} == {3}
    left["step"](params, left["opt_state"], batch)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_a_model_that_is_split_trains_and_is_resized():
    first, *optimizers, own_step, resizing = blocks("sharded.md")
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
        state = sharding.worker_copies(state, names["mesh"], axis_name="data")
        # Another function, or jit would take the last program, of the last `tx`.
        step = sharding.worker_step(names["train_step"], names["mesh"], axis_name="data")
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


def notebook():
    """The code of each cell."""
    cells = json.loads((ROOT / "examples" / "start.ipynb").read_text())["cells"]
    return ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch, capsys):
    """On this process's devices, whose number it would set itself."""
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    left = execute("\n".join(notebook()))
    assert left["one_bit_loss"] == pytest.approx(left["dense_loss"], rel=0.02)
    printed = capsys.readouterr().out
    assert re.search(r"^400 loss \S+ (compression|refresh)$", printed, re.MULTILINE)
    assert re.search(r"^compression +all-to-all +u8 ", printed, re.MULTILINE)
    assert printed.endswith("use it.\n")


def test_the_notebook_says_what_it_lacks(monkeypatch):
    packages, devices, *_ = notebook()
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="restart the kernel"):
        execute(devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="has no jax: pip install"):
        execute(packages)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "JAX finds no accelerator on "),
        (("--nodes", "3", "--cpu-devices", "4"), "4 devices in 1 processes do not divide"),
    ],
)
def test_the_program_for_hosts_says_what_it_lacks(options, reason, monkeypatch):
    program = runpy.run_path(str(ROOT / "examples" / "hosts.py"))
    monkeypatch.setattr(sys, "argv", ["hosts.py", *options])
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(jax, "devices", lambda: devices[:4])
    monkeypatch.setattr(jax.distributed, "initialize", mock.Mock())
    with pytest.raises(SystemExit, match=f"^error: {reason}"):
        program["main"]()


def test_a_node_of_the_program_for_hosts_is_a_slice(monkeypatch):
    """Also where the devices of slices alternate; `jax.make_mesh` refuses those of several."""

    monkeypatch.setattr(jax, "devices", lambda: devices_of_slices(4, 2))
    made = mock.Mock()
    monkeypatch.setattr(jax.sharding, "Mesh", made)
    runpy.run_path(str(ROOT / "examples" / "hosts.py"))["make_mesh"](2, False)
    rows, names = made.call_args.args
    assert [[x.id for x in row] for row in rows] == [[0, 2], [1, 3]]
    assert names == PAIR


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_in_the_book_and_its_links_lead(page):
    index = (DOCS / "index.md").read_text()
    assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE)
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (DOCS / target).exists(), target


def test_every_picture_is_shown():
    shown = "".join(page.read_text() for page in [*PAGES, ROOT / "README.md"])
    for picture in DOCS.rglob("*.png"):
        assert "_build" in picture.parts or picture.name in shown, picture


def test_code_and_messages_name_pages_that_exist():
    for folder in ("onebit_jax", "train", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for page in re.findall(r"\bdocs/([\w-]+\.md)", path.read_text()):
                assert (DOCS / page).exists(), f"{path}: {page}"


def test_every_function_and_error_has_an_example_that_runs():
    """In a docstring, in a page, or in README. The other classes are what functions return."""
    code = "".join(
        "".join(re.findall(r"```(?:python|diff)\n.*?```", page.read_text(), re.DOTALL))
        + "".join(re.findall(r"^\| `.*?` \|", page.read_text(), re.MULTILINE))
        for page in [*PAGES, ROOT / "README.md"]
    )
    code += "".join(
        line
        for path in (ROOT / "onebit_jax").rglob("*.py")
        for line in path.read_text().splitlines(keepends=True)
        if line.strip().startswith((">>>", "..."))
    )
    names = [x for x in onebit_jax.__all__ if x[0].islower() or x.endswith("Error")]
    assert [x for x in names if not re.search(rf"\b{x}\b", code)] == []


def start_host(index, address, *options):
    """The program for hosts as one of two processes of this machine."""
    where = ["--coordinator", address, "--processes", "2", "--process-id", str(index)]
    program = [sys.executable, "examples/hosts.py", "--nodes", "2", "--cpu-devices", "1"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*program, *where, *options], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.slow
def test_two_hosts_print_what_the_page_shows():
    address = free_address()
    hosts = [start_host(i, address, "--timeout", "300") for i in range(2)]
    printed = [host.communicate(timeout=600) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], printed
    text = (DOCS / "clusters.md").read_text()
    shown = re.search(r"^    2 processes.*?^    compression  total .*?\n", text, re.DOTALL | re.M)
    assert shown
    # Losses depend on the machine's arithmetic.
    tables = [x[x.index("phase  ") :].split() for x in (printed[0][0], shown[0])]
    assert tables[0] == tables[1]
