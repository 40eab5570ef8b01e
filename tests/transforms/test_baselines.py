"""What baselines declare in the registry is what their compiled programs send."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.plan.optimizers import bytes_at
from onebit_jax.transforms.registry import REGISTRY, Setting
from tests.workers import AXIS

BASELINES = ("geomesh", "local_steps_drive", "thresholded_adam", "fetch_sgd", "cada_adam")
SHAPES = {"matrix": (1024, 512), "vector": (77,)}
WORKERS = 4


def exchange_of(name: str, mesh: Any) -> Any:
    """The compiled update with an exchange."""
    entry = REGISTRY[name]
    tx = optax.with_extra_args_support(entry.make(Setting(1e-3, AXIS, warmup=1)))
    shapes = {x: jax.ShapeDtypeStruct(shape, jnp.float32) for x, shape in SHAPES.items()}
    state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), shapes)
    specs = onebit_jax.state_specs(state, (AXIS,))
    phase = {"phase": "sync" if entry.first_phase in ("local", "sync") else "compression"}

    def update(params: Any, state: Any) -> Any:
        return tx.update(params, state, params, **phase)

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    return jax.jit(mapped).lower(shapes, state).compile()


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.usefixtures("quick_compilation")
def test_what_is_sent_is_what_the_registry_says(name):
    mesh = jax.make_mesh((WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS])
    sent = wire.bytes_sent(wire.collectives(exchange_of(name, mesh), mesh))
    entry, size = REGISTRY[name], sum(int(np.prod(shape)) for shape in SHAPES.values())
    two_stages = 2 * (WORKERS - 1) / WORKERS * bytes_at(entry.bits)
    declared = entry.sends(WORKERS) if entry.sends else two_stages
    assert declared * size <= sent <= 1.03 * declared * size
