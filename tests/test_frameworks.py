"""docs/frameworks.md with Flax Linen and NNX, Equinox and Haiku: its code, executed."""

import functools
import pathlib
import re
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from tests.small_task import MESH, WORKERS, assert_close, assert_replicas_agree, make_batches
from tests.small_task import onebit as onebit_adam

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "frameworks.md"
FRAMEWORKS = "Flax Linen", "Flax NNX", "Equinox", "Haiku"
ALLOWED = 0.02  # of accuracy, on 400 digits


def blocks(heading):
    """The blocks of code under a heading, up to the next: pairs of language and code."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    text = parts[parts.index(heading) + 1]
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def side(diff, sign):
    """What stands on one side of a diff."""
    lines = [line for line in diff.splitlines() if not line or line[0] in (" ", sign)]
    return "\n".join(line[1:] for line in lines)


def execute(code, names, kind=AxisType.Explicit):
    """Runs code of the page, on four workers."""
    four = functools.partial(jax.make_mesh, devices=jax.devices()[:WORKERS], axis_types=(kind,))
    with (
        mock.patch.object(jax, "device_count", return_value=WORKERS),
        mock.patch.object(jax, "make_mesh", four),
    ):
        exec(code, names)


@functools.cache
def trained(framework, sign, kind=AxisType.Explicit) -> dict[str, Any]:
    """The names that a framework's code leaves, of either side of its diff."""
    names: dict[str, Any] = {"__name__": __name__}
    [(_, data)] = blocks("Frameworks")
    execute(data, names)
    *before, last = blocks(framework)
    if framework in ("Equinox", "Haiku"):
        # The page has the loop once, with Linen.
        before.append(blocks("Flax Linen")[2])
    for language, code in (*before, last):
        execute(side(code, sign) if language == "diff" else code, names, kind)
    return names


def marks(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_per_worker) if is_per_worker(x)]


@pytest.mark.parametrize(
    ("framework", "kind"),
    [
        pytest.param("Flax NNX", AxisType.Auto, marks=pytest.mark.slow),
        *(pytest.param(x, AxisType.Explicit, marks=pytest.mark.slow) for x in FRAMEWORKS),
    ],
    ids=str,
)
def test_one_bit_ends_at_the_accuracy_of_the_plain_loop(framework, kind):
    plain, onebit = trained(framework, "-"), trained(framework, "+", kind)
    assert onebit["mesh"].axis_types == (kind,)
    assert onebit["metrics"]["frozen_at"] == 40
    assert plain["accuracy"] > 0.95
    assert abs(plain["accuracy"] - onebit["accuracy"]) < ALLOWED
    for leaf in jax.tree.leaves((onebit["params"], onebit["model_state"])):
        assert leaf.sharding.is_fully_replicated


@pytest.mark.slow
def test_a_train_state_goes_through_a_shard_map():
    names = dict(trained("Flax Linen", "+"))
    with pytest.raises(ValueError, match=r"^axis_name='data': no axis.*onebit_jax.init"):
        train_state.TrainState.create(
            apply_fn=names["net"].apply, params=names["params"], tx=names["tx"]
        )
    [(_, code)] = blocks("TrainState")
    execute(code, names)

    def step(state, batch, rng):
        rng = jax.random.fold_in(rng, jax.lax.axis_index("data"))

        def with_aux(params):
            loss, _, model_state = names["loss_fn"](params, batch, rng, state.model_state)
            return loss, model_state

        (loss, model_state), grads = jax.value_and_grad(with_aux, has_aux=True)(state.params)
        model_state, loss = jax.lax.pmean((model_state, loss), "data")
        return state.apply_gradients(grads=grads, model_state=model_state), loss

    state, mesh, loss = names["state"], names["mesh"], np.inf
    specs = onebit_jax.state_specs(state, "data")
    assert len(marks(specs)) == len(marks(state)) > 0
    stepped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, P("data"), P()),
            out_specs=(specs, P()),
            check_vma=False,
        )
    )

    def put(tree, spec):
        return jax.device_put(tree, jax.tree.map(lambda x: NamedSharding(mesh, x), spec))

    state = put(state, specs)
    for t, batch in enumerate(names["batches"][:60]):
        state, loss = stepped(state, put(batch, P("data")), put(jax.random.key(t), P()))
    assert state.step == 60
    rows = [np.asarray(x) for mark in marks(state.opt_state) for x in jax.tree.leaves(mark)]
    assert any(len(np.unique(x, axis=0)) == WORKERS for x in rows)
    assert loss < 0.3
    assert_replicas_agree((state.params, state.model_state))

    given = state.params, state.opt_state, names["batches"][0]
    *_, metrics = names["step"](*given, rng=jax.random.key(0), model_state=state.model_state)
    assert metrics["phase"] == 1


def test_a_state_that_nnx_split_is_refused():
    tx = onebit_adam()
    model = nnx.Linear(9, 5, rngs=nnx.Rngs(0))
    on_mesh = optax.GradientTransformation(
        lambda params: onebit_jax.init(tx, params, MESH), tx.update
    )
    optimizer = nnx.Optimizer(model, on_mesh, wrt=nnx.Param)
    count = len(marks(onebit_jax.init(tx, nnx.state(model), MESH)))
    assert len(marks(optimizer.opt_state)) == len(marks(nnx.as_pure(optimizer.opt_state))) == count

    graphdef, split = nnx.split(optimizer)
    assert not marks(split)
    assert len(marks(nnx.merge(graphdef, split).opt_state)) == count
    graphdef, params = nnx.split(model)
    step = onebit_jax.train_step(
        lambda params, batch: jnp.mean((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2),
        tx,
        MESH,
    )
    [batch] = make_batches(1)
    with pytest.raises(ValueError, match="is not a state of this optimizer"):
        step(params, split, batch)
    for lost in (split["opt_state"], nnx.to_pure_dict(split)["opt_state"]):
        with pytest.raises(ValueError, match="without its PerWorker nodes"):
            step(params, lost, batch)
    opt_state = onebit_jax.init(tx, params, MESH)
    assert step(params, opt_state, batch)[2]["phase"] == 0


# What the page says besides


@pytest.mark.slow
def test_a_model_of_linen_is_evaluated_on_the_mesh_and_on_one_device():
    names = dict(trained("Flax Linen", "+"))
    execute("from jax.sharding import NamedSharding, PartitionSpec as P", names)
    for _, code in blocks("Evaluation"):
        execute(code, names)
    np.testing.assert_allclose(names["alone"], names["logits"], atol=1e-4)
    np.testing.assert_allclose(names["shared"], names["logits"], atol=1e-4)
    assert len(names["alone"].devices()) == 1
    assert names["shared"].sharding.spec[0] == "data"


@pytest.mark.slow
def test_a_model_of_nnx_is_evaluated_on_one_device():
    names = dict(trained("Flax NNX", "+", AxisType.Auto))
    code = re.search(r"`(nnx\.update\(model, \*jax.*?)`\.", PAGE.read_text())
    model = names["model"] = nnx.clone(names["model"])
    assert code
    execute(code[1], {**names, "nnx": nnx})
    logits = model(names["test_images"])
    assert len(logits.devices()) == 1
    np.testing.assert_allclose(logits, names["logits"], atol=1e-4)


class Normalized(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(nn.Dense(8)(x))
        return nn.Dense(5)(nn.relu(x))


def test_with_an_axis_batch_norm_is_that_of_the_whole_batch():
    batches = make_batches(4)
    variables = Normalized().init(jax.random.key(0), batches[0]["x"], train=False)

    def loss_of(net):
        def loss_fn(params, batch, model_state):
            y, model_state = net.apply(
                {"params": params, **model_state}, batch["x"], mutable=["batch_stats"]
            )
            return jnp.mean((y - batch["y"]) ** 2), {}, model_state

        return loss_fn

    def train(net, mesh):
        tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
        model_state = jax.tree.map(jnp.copy, variables)
        params = model_state.pop("params")
        opt_state = onebit_jax.init(tx, params, mesh)
        step = onebit_jax.train_step(loss_of(net), tx, mesh)
        for batch in batches:
            params, opt_state, model_state, _ = step(
                params, opt_state, batch, model_state=model_state
            )
        return jax.device_get((params, model_state))

    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    expected = train(Normalized(), one)
    assert_close(train(Normalized("data"), MESH), expected)
    own = train(Normalized(), MESH)
    kernel = lambda trained: trained[0]["Dense_0"]["kernel"]  # noqa: E731
    assert np.abs(kernel(own) - kernel(expected)).max() > 1e-4
