"""States of a split model taken to another number of workers.

Every place along the fast axes holds shards, so what becomes of its state is what `resize` makes of
an unsplit state of these shards, taken from the devices of the place by hand. At one bit: at more,
an unsplit model's small tensors travel together, a split one's alone.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.states.placed import Placed, by_place, from_places
from onebit_jax.states.specs import MeshAxes
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import make_mesh

SPECS = {"matrix": P("fsdp", None), "columns": P(None, "fsdp"), "bias": P()}
SHAPES = {"matrix": (64, 5), "columns": (6, 40), "bias": (3,)}


def mesh_of(workers, kind=AxisType.Auto):
    return make_mesh((workers, 2), (SLOW, "fsdp"), kind)


def split_of(mesh):
    explicit = mesh.axis_types[0] == AxisType.Explicit
    return {"axis_name": SLOW, "param_specs": None if explicit else SPECS}


def loss_fn(params, batch):
    decayed = (params["columns"] ** 2).mean() + ((params["bias"] - 1) ** 2).mean()
    return ((batch @ params["matrix"].T) ** 2).mean() + decayed


def draw(mesh):
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(
            rng.standard_normal(shape, np.float32), NamedSharding(mesh, SPECS[name])
        )
        for name, shape in SHAPES.items()
    }


def train(mesh, tx, state=None, steps=6):
    """Steps on gradients that differ between workers."""
    split = split_of(mesh)
    params, opt_state = state or (draw(mesh), onebit_jax.init(tx, draw(mesh), mesh, **split))
    step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
    rows = NamedSharding(mesh, P(SLOW))
    for i in range(steps):
        batch = np.random.default_rng(i).standard_normal((8, 5), np.float32)
        params, opt_state, metrics = step(params, opt_state, jax.device_put(batch, rows))
        jax.block_until_ready(metrics)
    return params, opt_state


def at_place(x, mesh, place, own):
    """What the devices of one place hold of an array: of all workers, or of the first."""
    held = {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}
    of_workers = [held[device] for device in mesh.devices[:, place]]
    return np.concatenate(of_workers) if own else of_workers[0]


def shards_at(params, mesh, place):
    return {name: at_place(x, mesh, place, own=False) for name, x in params.items()}


def state_at(tx, params, opt_state, mesh, place):
    """The state of one place as that of a whole model, whose workers are one device each."""
    alone = make_mesh((mesh.shape[SLOW],), (SLOW,))
    like = onebit_jax.init(tx, shards_at(params, mesh, place), alone)

    def held(x, y):
        own = y.sharding.spec[:1] == (SLOW,)
        return jax.device_put(at_place(x, mesh, place, own).reshape(y.shape), y.sharding)

    return jax.tree.map(held, opt_state, like)


OPTIMIZERS = {
    "onebit_adam": lambda: onebit_jax.onebit_adam(1e-2, warmup=3, axis_name=SLOW),
    "onebit_adam, warm-up": lambda: onebit_jax.onebit_adam(1e-2, warmup=9, axis_name=SLOW),
    "compressed_mean": lambda: optax.chain(onebit_jax.compressed_mean(SLOW), optax.adam(1e-2)),
    "birder": lambda: onebit_jax.birder(1e-3, seed=0, axis_name=SLOW),
    "local_steps, streaming": lambda: onebit_jax.local_steps(
        optax.adam(1e-2), optax.sgd(0.5), every=2, axis_name=SLOW, bits=1, fragments=2, delay=1
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "to_workers"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_each_place_it_is_the_state_of_shards_that_is_resized(name, workers, to_workers):
    before, after, tx = mesh_of(workers), mesh_of(to_workers), OPTIMIZERS[name]()
    params, opt_state = train(before, tx)
    moved = onebit_jax.resize(opt_state, tx, params, after, from_axes=before, **split_of(after))
    for place in range(2):
        shards = shards_at(params, before, place)
        expected = onebit_jax.resize(
            state_at(tx, params, opt_state, before, place),
            tx,
            shards,
            make_mesh((to_workers,), (SLOW,)),
            from_axes={SLOW: workers},
        )
        put = jax.tree.map(
            lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(after, spec)), params, SPECS
        )
        found = state_at(tx, put, moved, after, place)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("kind", meshes.TYPES)
def test_a_run_goes_on_from_a_checkpoint_of_another_number(kind, tmp_path):
    tensor = onebit_jax.ExchangeOptions(scale_per="tensor")
    tx = onebit_jax.onebit_adam(1e-2, warmup=3, axis_name=SLOW, exchange=tensor)
    before, after = (mesh_of(n, meshes.TYPES[kind]) for n in (2, 4))
    with jax.set_mesh(before), Checkpoints(tmp_path) as checkpoints:
        params, opt_state = train(before, tx)
        checkpoints.save(6, params, opt_state)
    with jax.set_mesh(after), Checkpoints(tmp_path) as checkpoints:
        fresh = draw(after)
        state = onebit_jax.init(tx, fresh, after, **split_of(after))
        restored = checkpoints.restore(fresh, state, tx=tx)
        expected = onebit_jax.resize(
            opt_state, tx, params, after, from_axes=before, **split_of(after)
        )
        jax.tree.map(np.testing.assert_array_equal, restored.opt_state, expected)
        batch = np.random.default_rng(0).standard_normal((8, 5), np.float32)
        begun = float(loss_fn(jax.device_get(restored.params), batch))
        params, opt_state = train(after, tx, (restored.params, restored.opt_state))
        assert float(loss_fn(jax.device_get(params), batch)) < begun
    onebit_jax.diagnose(params, opt_state, after, axis_name=SLOW)


@pytest.mark.parametrize("name", ["matrix", "columns", "bias"])
@pytest.mark.parametrize("own", [False, True])
def test_a_leaf_by_place_is_what_the_places_hold(name, own):
    mesh = mesh_of(2)
    axes, spec = (
        MeshAxes(mesh, SLOW),
        P(*SPECS[name], *[None] * (len(SHAPES[name]) - len(SPECS[name]))),
    )
    x = np.random.default_rng(0).standard_normal((2,) * own + SHAPES[name], np.float32)
    placed = Placed(SHAPES[name], x.dtype, spec, leading=False, own=own)
    array = jax.device_put(x, NamedSharding(mesh, P(SLOW, *spec) if own else spec))
    found = by_place(axes, placed, x)
    for place in range(2):
        at = found[:, place] if own else found[place]
        np.testing.assert_array_equal(at, at_place(array, mesh, place, own))
    np.testing.assert_array_equal(from_places(axes, placed, found), x)


def test_another_split_is_refused():
    tx = onebit_jax.compressed_mean(SLOW)
    before = mesh_of(2)
    params = draw(before)
    opt_state = onebit_jax.init(tx, params, before, **split_of(before))
    four = jax.make_mesh((2, 4), (SLOW, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(
        ValueError, match=r"is to go on with a model that is split over \{'fsdp': 4\}"
    ):
        onebit_jax.resize(opt_state, tx, params, four, from_axes=before, **split_of(four))


@pytest.mark.slow
def test_workers_lie_in_the_order_of_the_pair_whichever_the_mesh_has():
    pair, found = ("node", "local"), []
    split: Any = {"axis_name": pair, "param_specs": SPECS}
    tx = onebit_jax.onebit_adam(1e-2, warmup=1, axis_name=pair)
    after = make_mesh((1, 2, 2), (*pair, "fsdp"), AxisType.Auto)
    fresh = draw(after)
    for names in (pair, pair[::-1]):
        mesh = make_mesh((2, 2, 2), (*names, "fsdp"), AxisType.Auto)
        params, rng = draw(mesh), np.random.default_rng(0)

        def drawn(x, rng=rng):
            if x.dtype != np.float32:
                return x
            return jax.device_put(rng.random(x.shape, np.float32), x.sharding)

        opt_state = jax.tree.map(drawn, onebit_jax.init(tx, params, mesh, **split))
        found.append(onebit_jax.resize(opt_state, tx, fresh, after, from_axes=mesh, **split))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, found))
