"""`init`, `state_specs` and `train_step` on a mesh of eight CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.per_worker import is_per_worker
from tests.workers import PAIR, on_workers, onebit_state, replicate, residuals

NODES = 2, 4
WORKERS, ROWS, WARMUP, LEARNING_RATE = 8, 32, 3, 1e-2
ONEBIT_METRICS = {"loss", "grad_norm", "phase", "frozen_at", "variance_ratio", "residual_ratio"}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def explicit_mesh():
    return jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="module")
def nodes_mesh():
    return jax.make_mesh(NODES, PAIR, axis_types=(AxisType.Auto,) * 2)


def make_params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    return {"hidden": {"kernel": draw(5, 7), "bias": draw(7)}, "out": draw(7, 3)}


def make_batches(count, dtype=jnp.float32, rows=ROWS):
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    return [{"x": draw(rows, 5), "y": draw(rows, 3)} for _ in range(count)]


def loss_and_metrics(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    error = hidden @ params["out"] - batch["y"]
    return jnp.mean(error**2), {"bias": jnp.mean(error)}


def loss_fn(params, batch):
    return loss_and_metrics(params, batch)[0]


def onebit(axis_name: str | tuple[str, str] = "data", **options):
    return onebit_jax.onebit_adam(LEARNING_RATE, warmup=WARMUP, axis_name=axis_name, **options)


def dense(axis_name: str | tuple[str, str] = "data"):
    return optax.chain(onebit_jax.mean_gradients(axis_name), optax.adamw(1e-3))


def start(tx, mesh, params=None, loss_fn=loss_fn, **options):
    """A step, and the parameters and state to begin with."""
    params = make_params() if params is None else params
    step = onebit_jax.train_step(loss_fn, tx, mesh, **options)
    return step, (params, onebit_jax.init(tx, params, mesh))


def train(step, params, opt_state, batches):
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, batch)
    return params, opt_state


def shares(batch):
    """Splits the first axis over the workers, as the mesh does."""
    return jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def workers_gradients(params, batch):
    """Each worker's own gradient, a list of trees."""
    parts = shares(batch)
    return [jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[i], parts)) for i in range(WORKERS)]  # noqa: B023


def assert_close(got, expected):
    """Floats to a part of each tensor's largest value, integers exactly; not bytes of floats."""

    def check(path, got, expected):
        name, got, expected = jax.tree_util.keystr(path), np.asarray(got), np.asarray(expected)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        if jnp.issubdtype(expected.dtype, jnp.floating):
            got, expected = got.astype(np.float64), expected.astype(np.float64)
            allowed = 1e-5 * np.abs(expected).max(initial=1e-2)
            np.testing.assert_allclose(got, expected, rtol=0, atol=allowed, err_msg=name)
        elif expected.dtype != np.uint8:
            np.testing.assert_array_equal(got, expected, err_msg=name)

    jax.tree_util.tree_map_with_path(check, got, expected)


def simulate(tx, params, batches, mapped=lambda f: jax.vmap(f, axis_name="data")):
    """Trains by hand under `vmap`; yields parameters and state as a mesh would hold them.

    Every worker takes the gradient of its own share of the batch, and nothing else.
    """

    def update(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(mapped(update))
    params = replicate(params, WORKERS)
    state = mapped(tx.init)(params)
    for batch in batches:
        params, state = update(params, state, shares(batch))
        yield jax.tree.map(
            lambda node: jax.tree.map(lambda x: x[:, 0], node) if is_per_worker(node) else node[0],
            (params, state),
            is_leaf=is_per_worker,
        )


# What is computed


@pytest.mark.parametrize(
    ("mesh_name", "dtype", "static"),
    [
        ("explicit_mesh", "float32", False),
        ("mesh", "float32", True),
        ("mesh", "bfloat16", False),
    ],
    ids=["explicit mesh", "static phase", "bfloat16"],
)
def test_every_worker_trains_on_its_own_gradient(request, mesh_name, dtype, static):
    tx, batches = onebit(weight_decay=0.1), make_batches(WARMUP + 4, dtype)
    step, (params, opt_state) = start(tx, request.getfixturevalue(mesh_name), make_params(dtype))
    by_hand = simulate(tx, params, batches)
    for t, (batch, expected) in enumerate(zip(batches, by_hand, strict=True)):
        phase = ("warmup" if t < WARMUP else "compression") if static else None
        params, opt_state, _ = step(params, opt_state, batch, phase=phase)
        assert_close((params, opt_state), expected)
    e = residuals(onebit_state(opt_state))[0]["out"]
    assert len(np.unique(e, axis=0)) == WORKERS


def test_nodes_train_as_simulated_ones_do(nodes_mesh):
    batches = make_batches(WARMUP + 3)
    tx = onebit(PAIR)
    step, (params, opt_state) = start(tx, nodes_mesh)
    by_hand = simulate(tx, params, batches, lambda f: on_workers(f, NODES))
    for batch, expected in zip(batches, by_hand, strict=True):
        params, opt_state, _ = step(params, opt_state, batch)
        assert_close((params, opt_state), expected)
    e = residuals(onebit_state(opt_state))[0]["hidden"]["kernel"]
    # Shards are of whole bytes a node: of 35 elements the last one has none.
    assert [len(np.unique(e[shard::4], axis=0)) for shard in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_dense_training_is_adamw_on_the_whole_batch(mesh, accumulation):
    step, (params, opt_state) = start(
        dense(), mesh, loss_fn=loss_and_metrics, accumulation=accumulation
    )
    adamw = optax.adamw(1e-3)
    expected, adamw_state = params, adamw.init(params)
    whole_batch = jax.jit(jax.value_and_grad(loss_and_metrics, has_aux=True))
    for batch in make_batches(3):
        norms = [norm(g) for g in workers_gradients(expected, batch)]
        (loss, own), grads = whole_batch(expected, batch)
        updates, adamw_state = adamw.update(grads, adamw_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, opt_state, metrics = step(params, opt_state, batch)
        assert_close(params, expected)
        grad_norm = jnp.float32(np.sqrt(np.mean(np.square(norms))))
        scalars = {"loss": loss, "grad_norm": grad_norm, "phase": jnp.int32(0), **own}
        assert_close(metrics, scalars)


@pytest.mark.parametrize(
    ("clip", "max_grad_norm", "accumulation"),
    [
        ("common", None, 1),
        ("common", 2.0, 1),
        ("common", 2.0, 2),
        ("common", 1e3, 1),
        ("local", 2.0, 1),
        ("local", 2.0, 2),
        ("local", 1e3, 1),
    ],
)
def test_clipping_by_hand(mesh, clip, max_grad_norm, accumulation):
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(4 * WORKERS, 6)).astype(np.float32)
    rows *= np.repeat(np.arange(1, WORKERS + 1), 4)[:, None]  # some workers' gradients are small
    step, (params, opt_state) = start(
        optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(1.0)),
        mesh,
        np.zeros(6, np.float32),
        lambda params, batch: jnp.mean(batch @ params),
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        clip=clip,
    )
    params, _, metrics = step(params, opt_state, rows)

    gradients = rows.reshape(WORKERS, 4, 6).mean(1)
    norms = np.linalg.norm(gradients, axis=1)
    common = np.sqrt(np.mean(norms**2))
    clipped_by = np.full(WORKERS, common) if clip == "common" else norms
    factors = np.minimum(1, (max_grad_norm or np.inf) / clipped_by)
    assert (factors.min() < 1) == (max_grad_norm == 2.0)
    expected = -np.mean(factors[:, None] * gradients, axis=0)
    np.testing.assert_allclose(np.asarray(params), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], common, rtol=1e-6)


def test_metrics_by_hand(mesh):
    """b2 = 0.5, so that the variance is compared with that of two updates before."""
    b2 = 0.5
    step, (params, opt_state) = start(onebit(b2=b2), mesh, loss_fn=loss_and_metrics)
    v = jax.tree.map(np.zeros_like, params)
    v_norms = []
    for t, batch in enumerate(make_batches(WARMUP + 3), start=1):
        before = jax.device_get(params)
        params, opt_state, metrics = step(params, opt_state, batch)
        assert metrics.keys() == ONEBIT_METRICS | {"bias"}
        for name, value in metrics.items():
            integer = name in ("phase", "frozen_at")
            assert (value.shape, value.dtype) == ((), np.int32 if integer else np.float32), name
            assert value.sharding.is_fully_replicated, name

        loss, own = loss_and_metrics(before, batch)
        gradients = workers_gradients(before, batch)
        squares = [norm(g) ** 2 for g in gradients]
        if t <= WARMUP:
            mean = jax.tree.map(lambda *g: np.mean(g, 0), *gradients)
            v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, v, mean)
            v_norms.append(sum(x.sum() for x in jax.tree.leaves(v)))
        residual_ratio = 0.0
        if t > WARMUP:
            moved = jax.tree.map(lambda p, q: (p - np.asarray(q)) / LEARNING_RATE, before, params)
            momentum = jax.tree.map(lambda u, v: u * (np.sqrt(v) + 1e-8), moved, v)
            e, _ = residuals(onebit_state(opt_state))
            norms = [norm(jax.tree.map(lambda x: x[i], e)) for i in range(WORKERS)]  # noqa: B023
            residual_ratio = np.mean(norms) / norm(momentum)
        expected = {
            "loss": loss,
            "bias": own["bias"],
            "grad_norm": np.sqrt(np.mean(squares)),
            "phase": t > WARMUP,
            "frozen_at": WARMUP if t >= WARMUP else -1,
            "variance_ratio": v_norms[-1] / v_norms[-3] if t >= 3 else 0.0,
            "residual_ratio": residual_ratio,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=f"{name}, {t}")


def test_integer_metrics_of_the_loss_are_averaged_too(mesh):
    counts = np.arange(WORKERS, dtype=np.int32)

    def counting(params, batch):
        return jnp.sum(params) * 0.0, {"count": batch[0]}

    step, (params, opt_state) = start(onebit(), mesh, np.ones(3, np.float32), counting)
    _, _, metrics = step(params, opt_state, counts)
    assert metrics["count"] == counts.mean()


# What travels


@pytest.mark.parametrize(("clip", "scalars"), [(None, 4), ("common", 5), ("local", 4)])
def test_compression_sends_bytes_and_a_few_scalars(mesh, clip, scalars):
    """Four scalars are loss, squared norm and the optimizer's two ratios."""
    clipping = {} if clip is None else {"clip": clip, "max_grad_norm": 1.0}
    step, state = start(onebit(), mesh, **clipping)
    compiled = step.lower(*state, make_batches(1)[0], phase="compression").compile()
    sent = wire.collectives(compiled, mesh)
    payload, rest = ([c for c in sent if (c.dtype == "u8") == is_u8] for is_u8 in (True, False))
    assert [c.op for c in payload] == ["all-to-all", "all-gather"]
    assert {(c.op, c.dtype) for c in rest} == {("all-reduce", "f32")}
    assert sum(c.operand_bytes for c in rest) == 4 * scalars


def test_between_nodes_only_bytes_and_a_few_scalars_cross(nodes_mesh):
    step, (params, opt_state) = start(onebit(PAIR), nodes_mesh)
    batch, everywhere = make_batches(1)[0], ",".join(PAIR)
    sent = wire.by_phase(step, params, opt_state, batch, mesh=nodes_mesh)
    gradients = 4 * sum(x.size for x in jax.tree.leaves(params))
    dense = [(c.op, c.dtype, c.axis, c.operand_bytes) for c in sent["warmup"]]
    assert sorted(dense) == [
        ("all-reduce", "f32", everywhere, 4 * 4),
        ("all-reduce", "f32", everywhere, gradients),
    ]
    across = [(c.op, c.dtype, c.axis) for c in sent["compression"] if "node" in c.axis]
    assert sorted(across) == [
        ("all-gather", "u8", "node"),
        ("all-reduce", "f32", everywhere),
        ("all-to-all", "u8", "node"),
    ]
    scalars = [c for c in sent["compression"] if c.axis == everywhere]
    assert [c.operand_bytes for c in scalars] == [4 * 4]


def test_each_phase_of_one_program_has_its_own_collectives(mesh):
    step, (params, opt_state) = start(onebit(), mesh)
    compiled = step.lower(params, opt_state, make_batches(1)[0]).compile()
    sent = [(c.where, c.op, c.dtype, c.operand_bytes) for c in wire.collectives(compiled, mesh)]
    gradients = 4 * sum(x.size for x in jax.tree.leaves(params))
    row = onebit_state(opt_state).received.shape[1]
    assert sorted(sent) == [
        ("", "all-reduce", "f32", 4 * 4),
        ("conditional 1 branch 0", "all-reduce", "f32", gradients),
        ("conditional 1 branch 1", "all-gather", "u8", row),
        ("conditional 1 branch 1", "all-to-all", "u8", WORKERS * row),
    ]


# Where state lies


def test_state_is_sharded_or_replicated_as_its_marker_says(explicit_mesh):
    devices = list(explicit_mesh.devices)

    def check(leaf, spec):
        assert leaf.sharding.is_equivalent_to(NamedSharding(explicit_mesh, spec), leaf.ndim)
        for shard in leaf.addressable_shards:
            row = devices.index(shard.device)
            expected = leaf[row : row + 1] if spec else leaf
            np.testing.assert_array_equal(shard.data, expected)

    step, (params, opt_state) = start(onebit(), explicit_mesh)
    specs = onebit_jax.state_specs(opt_state, "data")
    for node in jax.tree.leaves(specs, is_leaf=is_per_worker):
        assert set(jax.tree.leaves(node)) == {P("data") if is_per_worker(node) else P()}
    jax.tree.map(check, opt_state, specs)
    params, opt_state, _ = step(params, opt_state, make_batches(1)[0])
    jax.tree.map(check, opt_state, specs)
    jax.tree.map(lambda leaf: check(leaf, P()), params)


def test_on_nodes_a_row_of_the_state_lies_with_its_device(nodes_mesh):
    _, (_, opt_state) = start(onebit(PAIR), nodes_mesh)
    devices = nodes_mesh.devices.reshape(-1).tolist()
    for node in jax.tree.leaves(opt_state, is_leaf=is_per_worker):
        for leaf in jax.tree.leaves(node):
            for shard in leaf.addressable_shards:
                row = devices.index(shard.device)
                expected = leaf[row : row + 1] if is_per_worker(node) else leaf
                np.testing.assert_array_equal(shard.data, expected)


def test_parameters_and_state_are_donated_and_the_batch_is_not(mesh):
    batch = jax.device_put(make_batches(1)[0], NamedSharding(mesh, P("data")))
    step, state = start(onebit(), mesh)
    params, opt_state, _ = step(*state, batch)
    step(params, opt_state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


def test_a_restored_state_continues_bit_for_bit(mesh):
    batches = make_batches(WARMUP + 6)
    step, state = start(onebit(), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state[1])
    middle = train(step, *state, batches[:-3])
    params, opt_state = jax.device_get(middle)
    uninterrupted = train(step, *middle, batches[-3:])
    resumed = train(step, params, jax.device_put(opt_state, shardings), batches[-3:])
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
    e = residuals(onebit_state(opt_state))[0]["out"]
    assert len(np.unique(e, axis=0)) == WORKERS


# How it is called


def test_the_second_call_compiles_nothing(mesh, caplog):
    batches = make_batches(2)
    step, state = start(onebit(), mesh)
    with jax.log_compiles():
        state = step(*state, batches[0])[:2]
        assert "Compiling" in caplog.text
        caplog.clear()
        step(*state, batches[1])
    assert not caplog.text


def test_batches_come_from_the_host_or_from_the_mesh(explicit_mesh):
    [batch] = make_batches(1)
    step, state = start(dense(), explicit_mesh)
    from_host = step(*state, batch)
    step, state = start(dense(), explicit_mesh)
    from_mesh = step(*state, jax.device_put(batch, NamedSharding(explicit_mesh, P("data"))))
    jax.tree.map(np.testing.assert_array_equal, from_host, from_mesh)


@pytest.mark.parametrize("name", ["mesh", "explicit_mesh"])
def test_runs_with_the_mesh_set_as_context(request, name):
    mesh = request.getfixturevalue(name)
    with jax.set_mesh(mesh):
        step, state = start(onebit(), mesh)
        _, _, metrics = step(*state, make_batches(1)[0])
    assert metrics["phase"] == 0


@pytest.mark.parametrize("phase", [None, "compression"])
def test_lowers_for_shapes(mesh, phase):
    step, (params, opt_state) = start(onebit(), mesh)
    [batch] = make_batches(1)
    shapes = jax.eval_shape(lambda *args: args, params, opt_state, batch)
    expected = step.lower(params, opt_state, batch, phase=phase).as_text()
    assert step.lower(*shapes, phase=phase).as_text() == expected


# Bad input


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": 0},
        {"accumulation": 1.5},
        {"accumulation": True},
        {"max_grad_norm": 0},
        {"max_grad_norm": float("nan")},
        {"max_grad_norm": float("inf")},
        {"clip": "global"},
    ],
    ids=str,
)
def test_bad_options_are_named(mesh, options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r} must be"):
        onebit_jax.train_step(loss_fn, onebit(), mesh, **options)


@pytest.mark.parametrize(
    ("rows", "accumulation", "parts"), [(30, 1, 8), (24, 2, 16), (4, 1, 8), (0, 1, 8)]
)
def test_a_batch_that_does_not_divide_is_named(mesh, rows, accumulation, parts):
    step, state = start(onebit(), mesh, accumulation=accumulation)
    [batch], [bad] = make_batches(1), make_batches(1, rows=rows)
    message = rf"^batch\['y'\] has shape \({rows}, 3\).* {parts} = 8 workers x accumulation"
    with pytest.raises(ValueError, match=message):
        step(*state, batch | {"y": bad["y"]})


def test_an_axis_that_the_mesh_lacks_is_named(mesh):
    with pytest.raises(ValueError, match=r"'model' is not bound.*\('data',\)"):
        onebit_jax.init(onebit(axis_name="model"), make_params(), mesh)
    step, state = start(dense("model"), mesh)
    with pytest.raises(ValueError, match=r"'model' is not bound.*\('data',\)"):
        step(*state, make_batches(1)[0])


def test_an_axis_of_the_mesh_that_nobody_averages_over_is_named(nodes_mesh):
    message = r"^axis_name='node' leaves out the axes \['local'\]"
    with pytest.raises(ValueError, match=message):
        onebit_jax.init(onebit("node"), make_params(), nodes_mesh)
    step, state = start(dense("node"), nodes_mesh)
    with pytest.raises(ValueError, match=message):
        step(*state, make_batches(1)[0])


def test_dense_training_on_nodes_averages_over_both_axes(nodes_mesh):
    [batch] = make_batches(1)
    step, (params, opt_state) = start(dense(PAIR), nodes_mesh)
    adamw = optax.adamw(1e-3)
    updates, _ = adamw.update(jax.grad(loss_fn)(params, batch), adamw.init(params), params)
    expected = optax.apply_updates(params, updates)
    assert_close(step(params, opt_state, batch)[0], expected)
