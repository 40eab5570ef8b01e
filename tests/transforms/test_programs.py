"""Bytes that updates send and states take, and every way to bind an axis or choose a phase."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import ExchangeOptions, contrib, wire
from onebit_jax.transforms import algorithm
from tests.optimizers import OPTIMIZERS, WITH_NODES
from tests.runs import Sizes, axis_of, mesh_of
from tests.small_task import assert_close
from tests.workers import AS_USERS, AXIS, BINDINGS, NODE, PAIR, draw, on_workers, replicate

# One that is padded in its chunks.
SHAPES = {"matrix": (2048, 96), "odd": (64, 1031)}
ELEMENTS = 2048 * 96 + 64 * 1031
FLAT, NODES = 4, (4, 2)


MAKE: dict[str, Any] = {
    "onebit_adam": functools.partial(
        onebit_jax.onebit_adam, 0.1, warmup=3, warmup_bits=32, variance_refreshes=None
    ),
    "onebit_lamb": functools.partial(
        onebit_jax.onebit_lamb, 0.1, warmup=3, warmup_bits=32, variance_refreshes=4
    ),
    "onebit_lamb_published": functools.partial(contrib.onebit_lamb_published, 0.1, warmup=3),
    "zero_one_adam": functools.partial(onebit_jax.zero_one_adam, 0.1, variance_freeze=4),
    "birder": functools.partial(onebit_jax.birder, 0.1, seed=0),
    "signum": functools.partial(onebit_jax.signum, 0.1),
    "distributed_lion": functools.partial(onebit_jax.distributed_lion, 0.1, weight_decay=0.1),
    "ef_signsgd": functools.partial(onebit_jax.ef_signsgd, 0.1, weight_decay=0.1),
    "compressed_mean": onebit_jax.compressed_mean,
    "local_steps": functools.partial(
        onebit_jax.local_steps, optax.sgd(0.1), optax.sgd(0.5), every=4
    ),
}
DENSE, BITS = {("all-reduce", "f32")}, {("all-gather", "u8"), ("all-to-all", "u8")}
GATHERED = {("all-gather", "u8")}
LARGEST = contrib.LargestValues(0.05)
REFRESHED = {"warmup_bits": 8, "variance_refreshes": 4}


def update_of(tx: Any, sizes: Sizes, phase: Any = None, shapes: Any = SHAPES) -> Any:
    """The lowered update on the devices of a mesh."""
    workers = mesh_of(sizes).size
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct((workers, *shape), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    tx = optax.with_extra_args_support(tx)
    state = jax.eval_shape(on_workers(tx.init, sizes), params)
    update = on_workers(functools.partial(tx.update, phase=phase), sizes, "shard_map")
    return update.lower(params, state, params)


def across(sent: Any, sizes: Sizes) -> Any:
    """The collectives between nodes."""
    return [c for c in sent if mesh_of(sizes).axis_names[0] in c.axis]


def sent_by(tx: Any, sizes: Sizes, phase: Any = None, shapes: Any = SHAPES) -> Any:
    return wire.collectives(update_of(tx, sizes, phase, shapes), mesh_of(sizes))


def slow_but(fast: tuple[str, ...], others: Any) -> Any:
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in others if name not in fast]
    return pytest.mark.parametrize("name", [*fast, *slow])


# Of an optimizer with options, on so many workers, in a phase: the operations between nodes, and
# the bits of a value there and back. With a scale for each 256 values it is 1/8 of a bit more.
SENT = [
    ("onebit_adam", {}, FLAT, "warmup", DENSE, 64),
    ("onebit_adam", {}, FLAT, "compression", BITS, 2),
    *[("onebit_adam", {}, n, "compression", BITS, 2) for n in (2, (2, 4))],
    ("onebit_adam", {}, (1, 3), "compression", DENSE, 64),
    ("onebit_adam", {"warmup_bits": 4}, FLAT, "warmup", BITS, 2 * 4.125),
    ("onebit_adam", REFRESHED, FLAT, "refresh", BITS, 2 + 2 * 8.125),
    ("onebit_lamb", {}, NODES, "compression", BITS, 2),
    ("onebit_lamb", {"warmup_bits": 8}, FLAT, "refresh", BITS, 2 + 2 * 8.125),
    ("zero_one_adam", {}, NODES, "sync", BITS, 2),
    ("zero_one_adam", {}, FLAT, "local", set(), 0),
    ("zero_one_adam", {"warmup_bits": 8}, FLAT, "warmup", BITS, 2 * 8.125),
    ("birder", {}, FLAT, "compression", BITS, 2),
    ("birder", {}, FLAT, "warmup", BITS, 4),
    ("signum", {}, 3, None, BITS, 2),
    ("distributed_lion", {}, NODES, None, BITS, 2),
    ("distributed_lion", {"aggregation": "mean"}, 3, None, BITS, 1 + 2),
    ("ef_signsgd", {}, FLAT, None, BITS, 2),
    ("compressed_mean", {"bits": 32}, FLAT, None, DENSE, 64),
    ("compressed_mean", {"compressor": contrib.Drive()}, FLAT, None, BITS, 2 * 1.125),
    # Eight bytes a value that has room, to all.
    ("compressed_mean", {"compressor": LARGEST}, FLAT, None, GATHERED, 4 * 64 * 0.05),
    # MuLoCo gathers what all workers compressed, so that its bytes grow with their number.
    *[("local_steps", {"bits": 4}, n, "sync", BITS, 2 * 4.125) for n in (2, 3, 8)],
    ("local_steps", {"bits": 4}, FLAT, "local", set(), 0),
    ("local_steps", {"bits": 32}, FLAT, "sync", DENSE, 64),
]
SENT_SLOW = [
    ("onebit_adam", {}, NODES, "compression", BITS, 2),
    ("onebit_adam", {"warmup_bits": 8}, FLAT, "warmup", BITS, 2 * 8.125),
    ("onebit_adam", REFRESHED, FLAT, "compression", BITS, 2),
    ("onebit_lamb_published", {}, FLAT, "warmup", DENSE, 64),
    ("onebit_lamb_published", {}, NODES, "compression", BITS, 2),
    ("zero_one_adam", {}, FLAT, "warmup", DENSE, 64),
    ("zero_one_adam", {}, FLAT, "compression", BITS, 2),
    ("zero_one_adam", {}, NODES, "local", set(), 0),
    ("birder", {}, NODES, "compression", BITS, 2),
    ("birder", {}, (1, 4), "compression", DENSE, 64),
    ("distributed_lion", {}, (1, 4), None, DENSE, 64),
    ("compressed_mean", {}, FLAT, "compression", BITS, 2),
    ("compressed_mean", {"compressor": contrib.MajorityVote()}, FLAT, None, BITS, 2),
    ("local_steps", {"bits": 2}, 4, "sync", BITS, 2 * 2.125),
]


@pytest.mark.parametrize(
    ("name", "options", "sizes", "phase", "kinds", "bits"),
    [*SENT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SENT_SLOW)],
    ids=lambda x: "" if isinstance(x, set | float) else str(x),
)
def test_what_an_update_sends(name, options, sizes, phase, kinds, bits):
    sent = sent_by(MAKE[name](axis_name=axis_of(sizes), **options), sizes, phase)
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    if nodes == 1:
        # The devices of a single node are its nodes.
        nodes, per_node, found = per_node, 1, sent
    else:
        found = across(sent, sizes)
        within = {c.dtype for c in sent if c not in found}
        assert within == {"f32", *(["u8"] if bits else [])} if per_node > 1 else not within
    assert {(c.op, c.dtype) for c in found} == kinds
    floor = bits * (nodes - 1) / nodes * ELEMENTS / (8 * per_node)
    assert floor <= wire.bytes_sent(found) <= 1.03 * floor + 4096
    if kinds == GATHERED:
        assert len(found) == 1
    if kinds == BITS:
        assert len(found) == 4 if bits in (4, 2 + 2 * 8.125) and phase != "compression" else 2


def test_birders_first_update_alone_sends_more_than_signs_where_the_host_does_not_say():
    sent = sent_by(MAKE["birder"](axis_name=AXIS), FLAT)
    assert {(c.op, c.dtype) for c in sent} == BITS
    once = wire.bytes_sent(sent_by(MAKE["birder"](axis_name=AXIS), FLAT, "compression"))
    assert wire.bytes_sent([c for c in sent if c.where]) == 3 * once


@pytest.mark.parametrize("delay", [0, 1])
def test_a_turn_of_local_steps_sends_its_share(delay):
    shapes = {str(i): (256, 256) for i in range(4)}

    def sent(fragments, phase):
        tx = MAKE["local_steps"](axis_name=AXIS, bits=1, fragments=fragments, delay=delay)
        return wire.bytes_sent(sent_by(tx, FLAT, phase, shapes))

    whole = sent(1, "sync")
    for phase in ("sync", "sync_3"):
        assert sent(4, phase) == pytest.approx(whole / 4, rel=0.05)
    assert sent(4, "local") == 0


@slow_but(("onebit_adam", "signum", "local_steps"), MAKE)
def test_buckets_reach_the_exchange(name):
    """Between nodes."""
    sizes, bits = (3, 2), {"bits": 1} if name == "local_steps" else {}
    phase = "sync" if name in ("local_steps", "zero_one_adam") else "compression"
    one, many = (
        across(sent_by(MAKE[name](axis_name=PAIR, exchange=how, **bits), sizes, phase), sizes)
        for how in (ExchangeOptions(bucket_bytes=None), ExchangeOptions(bucket_bytes=4096))
    )
    assert len(one) == 2
    assert len(many) > 2
    # Each bucket's rows have a length that is a multiple of 128 bytes.
    assert wire.bytes_sent(one) <= wire.bytes_sent(many) < 1.05 * wire.bytes_sent(one)
    assert max(c.operand_bytes for c in many) <= 3 * 4096


@slow_but(("onebit_adam, refreshed",), [*WITH_NODES, "signum", "distributed_lion"])
def test_one_device_a_node_is_the_flat_program(name):
    flat, pair = (
        update_of(
            OPTIMIZERS[name].make(axis), (4, 1), shapes={"rows": (64, 3), "odd": (13,)}
        ).as_text()
        for axis in (NODE, PAIR)
    )
    assert flat == pair


# What is copied.


def compiled(tx: Any, shapes: Any, phase: Any = None) -> Any:
    """The update and its application on two devices, all donated."""
    mesh = jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), params)
    specs = onebit_jax.state_specs(state, (AXIS,))
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params)

    def update(params, state, grads):
        grads = jax.tree.map(lambda g: g[0], grads)
        updates, state = tx.update(grads, state, params, **({"phase": phase} if phase else {}))
        return optax.apply_updates(params, updates), state

    in_specs = P(), specs, P(AXIS)
    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=in_specs, out_specs=in_specs[:2], check_vma=False
    )
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, grads).compile()


@pytest.mark.parametrize(
    "phase", [None, "compression", pytest.param("warmup", marks=pytest.mark.slow)]
)
def test_1bit_adam_is_written_in_place(phase):
    shapes = {"a": (1024, 512), "b": (512, 1001), "c": (77,)}
    sizes = compiled(MAKE["onebit_adam"](axis_name=AXIS), shapes, phase).memory_analysis()
    assert sizes.output_size_in_bytes - sizes.alias_size_in_bytes < 1024


# What a state takes.

HALF = {"exchange": ExchangeOptions(residual_dtype="bfloat16")}


@pytest.mark.parametrize(
    ("name", "options", "sizes", "expected"),
    [
        ("onebit_adam", {}, 4, 8.3 + 4 / 4),
        ("onebit_adam", {}, NODES, 8.3 + 4 / 8),
        ("onebit_adam", HALF, 4, 6.3 + 2 / 4),
        ("onebit_adam", {}, 2, 8.3 + 4 / 2),
        ("onebit_adam", {}, (2, 4), 8.3 + 4 / 8),
        ("onebit_adam", {"warmup_bits": 8}, 8, 8.3 + 4 / 8),
        ("onebit_lamb", {}, 4, 8.3 + 4 / 4),
        ("onebit_lamb_published", {}, 4, 12.4 + 4 / 4),
        ("zero_one_adam", {}, 4, 20.3 + 4 / 4),
        ("birder", {}, 4, 8),
        ("birder", {}, NODES, 8 / 2),
        ("signum", {}, 4, 4),
        ("distributed_lion", {}, NODES, 4 / 2),
        ("ef_signsgd", {}, 4, 8.1 + 4 / 4),
        ("ef_signsgd", HALF, 4, 4 + 2.1 + 2 / 4),
        ("compressed_mean", {}, 4, 4.1 + 4 / 4),
        ("compressed_mean", {"bits": 8}, 4, 4.1 + 4.1 / 4),
    ],
    ids=lambda x: str(x) if isinstance(x, str | int) else "",
)
def test_a_state_takes_the_bytes_a_parameter_that_its_page_says(name, options, sizes, expected):
    size = 2**20
    init = MAKE[name](axis_name=axis_of(sizes), **options).init
    shape = jax.ShapeDtypeStruct((mesh_of(sizes).size, size), jnp.float32)
    state = jax.eval_shape(on_workers(init, sizes), shape)
    taken = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / mesh_of(sizes).size
    assert 0.95 * expected * size < taken <= 1.01 * expected * size


# How an axis is bound, by whom the phase is chosen, and half precision.


def program_of(name: str, binding: Any = "vmap", phase: Any = None) -> Any:
    tx = optax.with_extra_args_support(OPTIMIZERS[name].make(AXIS))
    return on_workers(functools.partial(tx.update, phase=phase), 4, binding)


def starts(name: str, steps: int) -> Any:
    """Gradients, state and parameters before each update, on the host."""
    shapes, update = {"matrix": (16, 16), "vector": (13,)}, program_of(name)
    params = replicate(draw(0, shapes=shapes), 4)
    state = on_workers(OPTIMIZERS[name].make(AXIS).init, 4)(params)
    for t in range(steps):
        start = draw(1 + t, 4, shapes=shapes), state, params
        yield jax.device_get(start)
        updates, state = update(*start)
        params = jax.tree.map(jnp.add, params, updates)


@slow_but(("signum",), [name for name in OPTIMIZERS if name != "mean_gradients"])
@pytest.mark.usefixtures("quick_compilation")
def test_every_program_makes_the_same_update(name):
    """Simulated workers and devices; told the phase, as the program that chooses, to rounding.

    These two as users compile them, where XLA of JAX 0.12 contracts one sum of Birder's otherwise.
    By way of the host, since every binding places the same numbers elsewhere. On a mesh XLA
    contracts other sums and products, and adds norms up in another order.
    """
    program = functools.cache(program_of)
    to_the_bit = functools.cache(lambda *how: jax.jit(program(*how), compiler_options=AS_USERS))
    for start in starts(name, 6):
        _, state = chosen = jax.device_get(to_the_bit(name)(*start))
        for binding in BINDINGS[1:]:
            on_devices = jax.device_get(program(name, binding)(*start))
            # Updates may be differences of parameters, and are rounded as these.
            moved = [jax.tree.map(np.add, start[2], made[0]) for made in (on_devices, chosen)]
            assert_close((moved[0], on_devices[1]), (moved[1], state))
        coming = [x.progress.upcoming for x in algorithm.states_of(start[1])]
        if len(coming) == 1 and len(coming[0]):
            phase = algorithm.phase_of(int(coming[0][0, 0]))
            told = to_the_bit(name, "vmap", phase)(*start)
            chex.assert_trees_all_close(told, chosen, rtol=3e-7)
            chex.assert_trees_all_equal(
                *(algorithm.unchanged(x, phase) for x in (told[1], start[1]))
            )


@slow_but(("onebit_adam",), ("zero_one_adam", "onebit_lamb_published"))
@pytest.mark.usefixtures("quick_compilation")
def test_half_precision_is_computed_with_in_float32(name):
    update = program_of(name)
    for grads, state, params in starts(name, 5):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (grads, params))
        single = jax.tree.map(lambda x: x.astype(np.float32), half)
        (rounded, _), (exact, _) = (update(g, state, p) for g, p in (half, single))
        for x, y in zip(*map(jax.tree.leaves, (rounded, exact)), strict=True):
            assert x.dtype == jnp.bfloat16
            # Optax rounds thrice: the update, with decay, and times the learning rate.
            unit = float(jnp.finfo(jnp.bfloat16).eps)
            np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=1.5 * unit, atol=1e-5)
