import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import wire
from onebit_jax.collectives.axes import overwrite_if
from tests import small_task

AXES = ("node", "local")
SIZES = {"node": 2, "local": 4}
FLOATS = jax.ShapeDtypeStruct((128, 32), jnp.float32)
LOCAL = 128 // 8 * 32 * 4  # bytes of FLOATS on each of eight workers


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


def lower(worker, mesh, *args):
    """`worker`, which sees its share of each argument, on the whole mesh."""
    spec = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    ).lower(*args)


def shift(x, axis, by=1):
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])


# What an operation does, and the bytes that a worker sends of so many, among so many workers.
OPS = {
    "all-reduce": (lambda x, axis: lax.psum(x, axis), lambda b, n: 2 * (n - 1) * b / n),
    "all-gather": (lambda x, axis: lax.all_gather(x, axis), lambda b, n: (n - 1) * b),
    "all-to-all": (
        lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True),
        lambda b, n: (n - 1) * b / n,
    ),
    "reduce-scatter": (
        lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
        lambda b, n: (n - 1) * b / n,
    ),
    "collective-permute": (shift, lambda b, n: b),
}


@pytest.mark.parametrize("axis", ["node", "local", AXES], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_lowered_and_compiled_agree_on_every_operation(mesh, op, axis):
    run, sent = OPS[op]
    dtype = "u8" if axis == "local" else "f32"
    argument = jax.ShapeDtypeStruct(FLOATS.shape, {"u8": jnp.uint8, "f32": jnp.float32}[dtype])
    size = LOCAL if dtype == "f32" else LOCAL // 4
    axes = axis if isinstance(axis, tuple) else (axis,)
    n = math.prod(SIZES[name] for name in axes)
    expected = [wire.Collective(op, dtype, size, n, ",".join(axes), "", 1, int(sent(size, n)))]
    lowered = lower(partial(run, axis=axis), mesh, argument)
    assert wire.collectives(lowered, mesh) == expected
    assert wire.collectives(lowered.compile(), mesh) == expected


def test_fractions_of_a_byte_round_up():
    mesh = AbstractMesh((3,), ("data",), axis_types=(AxisType.Auto,))
    [found] = wire.collectives(
        lower(lambda x: lax.psum(x, "data"), mesh, jax.ShapeDtypeStruct((3,), jnp.float32)), mesh
    )
    assert found.bytes_sent == 6  # 2 * 2/3 * 4 = 5.33


def test_groups_that_follow_no_axis_are_unknown(mesh):
    def halves(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 3, 5, 6], [1, 2, 4, 7]])

    flat = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    lowered = lower(halves, flat, FLOATS)
    for known in (flat, None):
        [found] = wire.collectives(lowered, known)
        assert (found.axis, found.group_size) == ("?", 4)


@pytest.mark.parametrize(("pairs", "sent"), [([(0, 2)], LOCAL), ([], 0)])
def test_a_permutation_that_leaves_workers_out(mesh, pairs, sent):
    """It still has an axis; one of nobody sends nothing."""
    permuted = lower(lambda x: lax.ppermute(x, "local", pairs), mesh, FLOATS)
    [found] = wire.collectives(permuted.compile() if pairs else permuted, mesh)
    assert found.bytes_sent == sent
    assert not pairs or (found.axis, found.group_size) == ("local", 2)


def test_device_order_of_the_mesh_does_not_matter():
    shuffled = np.array(jax.devices())[[3, 1, 4, 0, 5, 7, 2, 6]].reshape(2, 4)
    mesh = jax.sharding.Mesh(shuffled, AXES)
    lowered = lower(lambda x: lax.psum(x, "local"), mesh, FLOATS)
    for program in (lowered, lowered.compile()):
        assert [c.axis for c in wire.collectives(program, mesh)] == ["local"]


def test_automatic_partitioning_shows_in_the_compiled_program_only(mesh):
    def sharding(*axes):
        return NamedSharding(mesh, P(*axes))

    lowered = jax.jit(jnp.dot, in_shardings=(sharding("node", "local"), sharding("local"))).lower(
        jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    )
    assert wire.collectives(lowered, mesh) == []
    assert wire.bytes_sent([]) == 0
    [found] = wire.collectives(lowered.compile(), mesh)
    assert (found.op, found.axis, found.operand_bytes) == ("all-reduce", "local", 8 * 16 * 4)


def test_a_function_counts_once_a_call(mesh):
    @jax.jit
    def average(x):
        return lax.pmean(x, "local")

    lowered = lower(lambda x: average(x) * average(x + 1), mesh, FLOATS)
    assert len(wire.collectives(lowered, mesh)) == 2
    assert len(wire.collectives(lowered.compile(), mesh)) in (1, 2)  # merged, or not
    assert wire.bytes_sent(wire.collectives(lowered, mesh)) == 3 * LOCAL
    assert wire.bytes_sent(wire.collectives(lowered.compile(), mesh)) == 3 * LOCAL


def scanned(x, length, inner=1):
    def step(carry, _):
        return lax.fori_loop(0, inner, lambda _, c: lax.pmean(c, "local") + 1, carry), None

    return lax.scan(step, x, length=length)[0]


def test_nested_loops_multiply(mesh):
    compiled = lower(partial(scanned, length=5, inner=3), mesh, FLOATS).compile()
    [found] = wire.collectives(compiled, mesh)
    assert (found.where, found.executions) == ("loop 2 / loop 1", 15)
    assert (found.operand_bytes, found.bytes_sent) == (LOCAL, 15 * LOCAL * 3 // 2)


def test_a_loop_of_unknown_length_is_said_to_be_one(mesh):
    def until_small(x):
        return lax.while_loop(
            lambda c: lax.pmean(c[0, 0], "local") > 1, lambda c: lax.pmean(c, "local") / 2, x
        )

    found = wire.collectives(lower(until_small, mesh, FLOATS).compile(), mesh)
    assert {(c.where, c.executions) for c in found} == {("loop 1", None)}
    assert sorted(c.bytes_sent for c in found) == [6, LOCAL * 3 // 2]
    with pytest.raises(
        ValueError, match=r"executions of the all-reduce in 'loop 1' is None.*compi"
    ):
        wire.bytes_sent(found)
    lines = wire.table(found).splitlines()
    assert lines[1].split()[-4:] == ["?", "3.1", "kB", "3,078"]
    assert lines[-1].startswith("times ?: in a loop whose trip count")


def test_a_loop_of_at_most_one_turn_counts_once(mesh):
    def worker(x, flag):
        def average(x):
            return overwrite_if(x[0, 0] > 0, lambda x: lax.pmean(x, "local"), x)

        x = overwrite_if(flag[0] > 0, lambda x: average(shift(x, "node")), x)
        return lax.fori_loop(0, 3, lambda _, x: average(x), x)

    lowered = lower(worker, mesh, FLOATS, jax.ShapeDtypeStruct((8,), jnp.int32))
    found = wire.collectives(lowered.compile(), mesh)
    assert sorted((c.where, c.op, c.executions) for c in found) == [
        ("loop 1 / once or never", "all-reduce", 3),
        ("once or never", "collective-permute", 1),
        ("once or never / once or never", "all-reduce", 1),
    ]
    assert wire.bytes_sent(found) == LOCAL + 4 * LOCAL * 3 // 2
    assert wire.table(found).splitlines()[-1].startswith("once or never: in a zero- or one-")


def test_of_a_conditional_the_branch_that_sends_most_counts(mesh):
    def worker(x, phase):
        dense = partial(lax.pmean, axis_name="local")

        def compressed(x):
            return lax.all_gather(x.astype(jnp.uint8), "local", tiled=True)[:16].astype(x.dtype)

        return shift(lax.cond(phase[0] > 0, compressed, dense, x), "node")

    lowered = lower(worker, mesh, FLOATS, jax.ShapeDtypeStruct((8,), jnp.int32))
    for program in (lowered, lowered.compile()):
        found = {c.where: c for c in wire.collectives(program, mesh)}
        assert set(found) == {"", "conditional 1 branch 0", "conditional 1 branch 1"}
        assert found["conditional 1 branch 0"].op == "all-reduce"
        assert found["conditional 1 branch 1"].op == "all-gather"
        assert wire.bytes_sent(found.values()) == LOCAL + LOCAL * 3 // 2
        assert "of each conditional" in wire.table(list(found.values()))


def test_conditionals_add_up_and_nest():
    def sent(size, where):
        return wire.Collective("all-gather", "u8", size, 2, "data", where, 1, size)

    assert (
        wire.bytes_sent(
            [
                sent(1, ""),
                sent(10, "conditional 1 branch 0"),
                sent(20, "conditional 1 branch 1"),
                sent(300, "conditional 2 branch 0 / loop 1"),
                sent(100, "conditional 2 branch 1 / conditional 3 branch 0"),
                sent(250, "conditional 2 branch 1 / conditional 3 branch 1"),
                sent(100, "conditional 2 branch 1"),
            ]
        )
        == 1 + 20 + 350
    )


@pytest.mark.parametrize(
    "program",
    [None, 3, "module @jit_f {}", jax.jit(lambda x: x)],
    ids=["none", "number", "stablehlo", "jitted"],
)
def test_what_is_no_program_is_refused(program):
    with pytest.raises(ValueError, match=r"program is .*; expected a jax.stages.Lowered"):
        wire.collectives(program)


def test_phases_side_by_side(mesh):
    @partial(jax.jit, static_argnames="phase")
    def step(x, phase):
        def worker(x):
            if phase == "warmup":
                return lax.pmean(x, AXES), lax.pmean(x[0, 0], AXES)[None]
            bits = lax.all_to_all(x.astype(jnp.uint8), AXES, 0, 0, tiled=True)
            return lax.all_gather(bits, AXES), lax.pmean(x[0, 0], AXES)[None]

        spec = P(AXES)
        return jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    phases = wire.by_phase(step, FLOATS, mesh=mesh)
    lines = wire.table(phases).splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = [" ".join(line.split()) for line in lines]
    assert cells[:3] == [
        "phase collective dtype axis workers times a worker sends bytes",
        "warmup all-reduce f32 node,local 8 1 3.6 kB 3,591",
        "warmup total 3.6 kB 3,591",
    ]
    assert set(cells[3:-1]) == {  # in the order of the compiler's schedule
        "compression all-to-all u8 node,local 8 1 448 B 448",
        "compression all-gather u8 node,local 8 1 3.6 kB 3,584",
        "compression all-reduce f32 node,local 8 1 7 B 7",
    }
    assert cells[-1] == "compression total 4.0 kB 4,039"
    assert wire.bytes_sent(phases["compression"]) == 4039


def test_phases_of_a_step_that_takes_more():
    """Its model's state is averaged over the workers; others cost nothing."""

    def loss_with(params, batch, rng, model_state):
        noise = jax.random.normal(rng, ()) * jnp.sum(params["layer"]["bias"])
        return small_task.loss_fn(params, batch) + noise, {}, model_state

    step, state = small_task.start(small_task.onebit(), loss_fn=loss_with)
    [batch] = small_task.make_batches(1)
    named = {"rng": jax.random.key(0), "model_state": {"mean": jnp.zeros(300)}}
    phases = wire.by_phase(
        step, *state, batch, mesh=small_task.MESH, phases=["compression"], **named
    )
    [compressed] = phases.values()
    assert {c.op for c in compressed} == {"all-to-all", "all-gather", "all-reduce"}
    floats = sum(c.operand_bytes for c in compressed if c.op == "all-reduce")
    assert 4 * 300 < floats < 4 * 350


def test_the_table_adds_up_what_is_alike():
    one = wire.Collective("all-gather", "u8", 700_000, 3, "data", "", 2, 2_800_000)
    line = wire.table([one, one._replace(executions=1, bytes_sent=1_400_000)]).splitlines()[1]
    assert " ".join(line.split()) == "all-gather u8 data 3 3 4.2 MB 4,200,000"
