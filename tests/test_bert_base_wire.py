"""What BERT-Base sends on eight workers, from compiled programs; no array of its size is made."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from train.bert.model import BertConfig, init_params

WORKERS = 8
# The collectives are settled before machine code is generated, which would take most of the time.
QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


def collectives(size, phase):
    """The tree's number of parameters, and what an update of 1-bit Adam on it sends."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    tx = onebit_jax.onebit_adam(1e-4, weight_decay=0.01, warmup=1000, axis_name="data")
    config = BertConfig.of_size(size, vocab_size=30_522)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    opt_state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), params)
    specs = onebit_jax.state_specs(opt_state, "data")

    def update(grads, opt_state, params):
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, opt_state, params, phase=phase)

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(P("data"), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype), params)
    compiled = jax.jit(mapped).lower(grads, opt_state, params).compile(QUICKLY)
    return sum(x.size for x in jax.tree.leaves(params)), wire.collectives(compiled, mesh)


@pytest.mark.slow
def test_compression_sends_one_bit_a_parameter_each_way():
    parameters, sent = collectives("base", "compression")
    assert parameters == pytest.approx(110e6, rel=0.01)
    assert [(c.op, c.dtype, c.where) for c in sent] == [
        ("all-to-all", "u8", ""),
        ("all-gather", "u8", ""),
    ]
    bound = 2 * (WORKERS - 1) / WORKERS * parameters / 8
    assert bound <= wire.bytes_sent(sent) <= 1.02 * bound


@pytest.mark.slow
def test_of_a_program_of_both_phases_each_sends_its_own():
    """Of tiny BERT: the base's takes long to compile."""
    parameters, sent = collectives("tiny", None)
    assert {(c.op, c.dtype, c.where) for c in sent} == {
        ("all-reduce", "f32", "once or never"),
        ("all-to-all", "u8", "once or never"),
        ("all-gather", "u8", "once or never"),
    }
    dense = [c.operand_bytes for c in sent if c.op == "all-reduce"]
    assert sum(dense) == 4 * parameters
