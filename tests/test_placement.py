"""Where `init` and `train_step` put parameters and state, on every kind of mesh."""

import contextlib
import functools
import itertools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms.phases import PHASES
from tests.small_task import (
    MESH,
    NODES_MESH,
    WARMUP,
    WORKERS,
    assert_close,
    assert_equal,
    dense,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    onebit,
    onebit_start,
    start,
    train,
)
from tests.workers import PAIR, replicate

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("nodes", [False, True], ids=["flat", "nodes"])
def test_state_is_sharded_or_replicated_as_its_marker_says(nodes):
    mesh, axes = (NODES_MESH, PAIR) if nodes else (MESH, "data")
    opt_state = onebit_jax.init(onebit(axes), make_params(), mesh)
    if not nodes:
        step, (params, _) = onebit_start()
        opt_state = train(step, params, opt_state, make_batches(1))[1]
    specs = onebit_jax.state_specs(opt_state, axes)
    for node in jax.tree.leaves(specs, is_leaf=is_per_worker):
        assert set(jax.tree.leaves(node)) == {P(axes) if is_per_worker(node) else P()}
    devices = mesh.devices.reshape(-1).tolist()

    def check(leaf, spec):
        assert leaf.sharding == NamedSharding(mesh, spec)
        for shard in leaf.addressable_shards:
            row = devices.index(shard.device)
            expected = jax.device_get(leaf)[row : row + 1] if spec else leaf
            np.testing.assert_array_equal(shard.data, expected)

    jax.tree.map(check, opt_state, specs)


KINDS = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_step_runs_on_every_kind_of_mesh_whichever_is_set(kind):
    """State goes from one kind of mesh to the other; batches come from the host, or from a mesh."""
    [batch] = make_batches(1)
    tx, mesh, others = dense(), make_mesh(kind=kind), [make_mesh(kind=other) for other in KINDS]
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    expected = None
    for made_on, around in itertools.product(others, [None, *others]):
        with contextlib.nullcontext() if around is None else jax.set_mesh(around):
            params = jax.tree.map(jnp.asarray, make_params())
            opt_state = onebit_jax.init(tx, params, made_on)
            assert {x.sharding.mesh for x in jax.tree.leaves(opt_state)} == {made_on}
            state = train(step, params, opt_state, [batch])
            on_mesh = jax.device_put(batch, NamedSharding(made_on, P("data")))
            state = train(step, *state, [on_mesh])
        assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}
        expected = jax.device_get(state) if expected is None else expected
        assert_equal(state, expected)


def test_the_own_loop_of_the_docs(monkeypatch, capsys):
    """Its state comes from `init`, and goes into `train_step`, which goes on as the loop would."""
    blocks, of_clusters = (
        re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        for page in ("your-own-loop.md", "clusters.md")
    )
    code = blocks[0].replace('1e-3, axis_name="data"', f'1e-3, warmup={WARMUP}, axis_name="data"')
    assert code != blocks[0]
    four = functools.partial(jax.make_mesh, devices=jax.devices()[:WORKERS])
    monkeypatch.setattr(jax, "device_count", lambda: WORKERS)
    monkeypatch.setattr(jax, "make_mesh", four)
    batches = make_batches(WARMUP + 3)
    names: dict[str, Any] = {"params": make_params(), "loss_fn": loss_fn, "batches": batches[:-1]}
    exec(code, names)
    assert len(capsys.readouterr().out.splitlines()) == len(batches) - 1

    mesh, params, opt_state = names["mesh"], names["params"], names["opt_state"]
    copies = jax.tree.map(jnp.copy, (params, opt_state))
    on_mesh = jax.device_put(batches[-1], NamedSharding(mesh, P("data")))
    expected = names["step"](params, opt_state, on_mesh)[:2]
    step = onebit_jax.train_step(loss_fn, names["tx"], mesh)
    params, opt_state, metrics = step(copies[0], copies[1], batches[-1])
    # The first updates after the freeze are all refreshes.
    assert (metrics["phase"], metrics["frozen_at"]) == (PHASES.index("refresh"), WARMUP)
    assert_close((params, opt_state), expected)
    more = {"params": make_params(), "init_params": make_params}
    more |= {"rows": replicate(make_params(), 2)}
    more |= {"coordinator_address": None, "num_processes": 1, "process_id": 0}
    for block in blocks[1:] + of_clusters[1:]:
        exec(block, names | more | {"nodes": 2, "devices_per_node": 2})


def test_parameters_and_state_are_donated_and_the_batch_is_not():
    step, state = onebit_start()
    batch = jax.device_put(make_batches(1)[0], NamedSharding(MESH, P("data")))
    state = train(step, *state, [batch])
    step(*state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


def test_a_step_is_compiled_once(caplog):
    """A state with weak types, which no step returns, would have the second compiled anew."""
    scheduled = optax.inject_hyperparams(optax.adam)(1e-2)
    tx = optax.chain(onebit_jax.compressed_mean("data"), scheduled)
    step, (params, opt_state) = start(tx, MESH)
    assert not any(x.weak_type for x in jax.tree.leaves(opt_state))
    with jax.log_compiles():
        for batch in make_batches(3):
            params, opt_state, _ = step(params, opt_state, batch)
    compiled = [x for x in caplog.messages if x.startswith("Finished XLA compilation of jit(step)")]
    assert len(compiled) == 1
