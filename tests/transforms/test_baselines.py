"""What baselines declare in the registry is what their compiled programs send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import wire
from onebit_jax.plan.optimizers import bytes_at
from onebit_jax.transforms.registry import REGISTRY, Setting
from tests.small_task import make_mesh
from tests.workers import AXIS, lowered_update

BASELINES = ("geomesh", "local_steps_drive", "thresholded_adam", "fetch_sgd", "cada_adam")
SHAPES = {"matrix": (1024, 512), "vector": (77,)}
WORKERS = 4


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.usefixtures("quick_compilation")
def test_what_is_sent_is_what_the_registry_says(name):
    mesh, entry = make_mesh((WORKERS,), (AXIS,)), REGISTRY[name]
    shapes = {x: jax.ShapeDtypeStruct(shape, jnp.float32) for x, shape in SHAPES.items()}
    phase = "sync" if entry.first_phase in ("local", "sync") else "compression"
    update = lowered_update(entry.make(Setting(1e-3, AXIS, warmup=1)), mesh, shapes, phase=phase)
    sent = wire.bytes_sent(wire.collectives(update.compile(), mesh))
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    two_stages = 2 * (WORKERS - 1) / WORKERS * bytes_at(entry.bits)
    declared = entry.sends(WORKERS) if entry.sends else two_stages
    assert declared * size <= sent <= 1.03 * declared * size
