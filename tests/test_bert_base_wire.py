"""What BERT-Base sends on eight workers, from compiled programs; no array of its size is made."""

import jax
import pytest
from jax.sharding import AxisType

import onebit_jax
from onebit_jax import wire
from tests.workers import lowered_update
from train.bert.model import BertConfig, init_params

WORKERS = 8
# The collectives are settled before machine code is generated, which would take most of the time.
QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


@pytest.mark.slow
def test_compression_sends_one_bit_a_parameter_each_way():
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    tx = onebit_jax.onebit_adam(1e-4, weight_decay=0.01, warmup=1000, axis_name="data")
    config = BertConfig.of_size("base", vocab_size=30_522)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    update = lowered_update(tx, mesh, params, phase="compression")
    sent = wire.collectives(update.compile(QUICKLY), mesh)
    assert parameters == pytest.approx(110e6, rel=0.01)
    assert [(c.op, c.dtype, c.where) for c in sent] == [
        ("all-to-all", "u8", ""),
        ("all-gather", "u8", ""),
    ]
    bound = 2 * (WORKERS - 1) / WORKERS * parameters / 8
    assert bound <= wire.bytes_sent(sent) <= 1.02 * bound
