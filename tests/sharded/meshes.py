"""Meshes with one slow axis, a model that is split over their fast axes, and its training step."""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding, wire
from tests.workers import make_mesh

SLOW = "data"
MESHES = {
    "model": {"data": 2, "model": 2},
    "fsdp": {"data": 2, "fsdp": 4},
    "fsdp, tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "four workers": {"data": 4, "fsdp": 2},
}
TYPES = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
CASES = [(mesh, kind) for mesh in MESHES for kind in TYPES]

_SHAPES = {"up": (16, 64), "down": (64, 16), "square": (16, 16), "gain": (64,), "bias": (16,)}
# Of "model" and "tensor" a mesh has at most one.
_SPLIT = {
    "up": (("fsdp",), ("model", "tensor")),
    "down": (("model", "tensor"), ("fsdp",)),
    "square": (("fsdp",), ()),
    "gain": (("model", "tensor"),),
    "bias": ((),),
}


def train_step(tx: Any, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A training step such as anybody writes it for one copy of the model."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    return step


class Task(NamedTuple):
    """A mesh, and how its parameters are split."""

    mesh: Mesh
    specs: dict[str, P]
    fast: tuple[str, ...]

    @property
    def given_specs(self) -> Any:
        """What `on_mesh` must be told."""
        return None if self.explicit else self.specs

    @property
    def explicit(self) -> bool:
        return self.mesh.axis_types[0] == AxisType.Explicit

    @property
    def workers(self) -> int:
        return self.mesh.shape[SLOW]

    @property
    def places(self) -> int:
        """Devices of a worker."""
        return math.prod(self.mesh.shape[name] for name in self.fast)

    def put(self, tree: Any, *leading: Any) -> Any:
        """Places a tree like the parameters, with leading axes that are split by these entries."""
        return {
            name: jax.device_put(x, NamedSharding(self.mesh, P(*leading, *self.specs[name])))
            for name, x in tree.items()
        }

    def params(self, seed: int = 0) -> Any:
        rng = np.random.default_rng(seed)
        return self.put(
            {
                name: rng.standard_normal(shape, np.float32) / math.sqrt(shape[0])
                for name, shape in _SHAPES.items()
            }
        )

    def batch(self, seed: int, rows: int = 64) -> Any:
        """Inputs and targets, split over the workers and over "fsdp"."""
        rng = np.random.default_rng(seed)
        axes = tuple(name for name in (SLOW, "fsdp") if name in self.mesh.shape)
        x = rng.standard_normal((rows, 16), np.float32)
        y = np.sin(3 * x) + 0.3 * rng.standard_normal(x.shape, np.float32)
        sharding = NamedSharding(self.mesh, P(axes, None))
        return {"x": jax.device_put(x, sharding), "y": jax.device_put(y, sharding)}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Of a network of two layers, each of whose weights is gathered over "fsdp" alone."""
        rows = "fsdp" if "fsdp" in self.mesh.shape else None
        tensor = next((name for name in ("model", "tensor") if name in self.mesh.shape), None)

        def whole(name: str) -> jax.Array:
            spec = P(*[tensor if tensor in _names(entry) else None for entry in self.specs[name]])
            if self.explicit:
                return jax.reshard(params[name], spec)
            return jax.lax.with_sharding_constraint(params[name], NamedSharding(self.mesh, spec))

        def dot(x: jax.Array, w: jax.Array, *spec: Any) -> jax.Array:
            kept = P(rows, *spec)
            if self.explicit:
                return jnp.dot(x, w, out_sharding=kept)
            return jax.lax.with_sharding_constraint(jnp.dot(x, w), NamedSharding(self.mesh, kept))

        h = dot(batch["x"], whole("square"), None)
        h = jnp.tanh(dot(h, whole("up"), tensor)) * params["gain"]
        y = dot(h, whole("down"), None) + params["bias"]
        return jnp.mean((y - batch["y"]) ** 2)

    def train_step(self, tx: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
        return train_step(tx, self.loss)

    def on_mesh(self, tx: optax.GradientTransformation) -> Any:
        return sharding.on_mesh(tx, self.mesh, axis_name=SLOW, specs=self.given_specs)

    def begin(self, tx: optax.GradientTransformation) -> tuple[Any, Any]:
        """Every worker's parameters and state, and the compiled step of these and a batch."""
        params = self.params()
        state = sharding.worker_copies((params, tx.init(params)), self.mesh, axis_name=SLOW)
        step = sharding.worker_step(self.train_step(tx), self.mesh, axis_name=SLOW)
        return state, jax.jit(step, donate_argnums=0).lower(state, self.batch(0)).compile()

    def begin_own(self, tx: Any, loss_fn: Any = None, **options: Any) -> tuple[Any, Any, Any]:
        """Parameters, state, and the training step of this library."""
        split = {"axis_name": SLOW, "param_specs": self.given_specs}
        params = self.params()
        opt_state = onebit_jax.init(tx, params, self.mesh, **split)
        step = onebit_jax.train_step(loss_fn or self.loss, tx, self.mesh, **split, **options)
        return params, opt_state, step

    def trained(self, state: Any, step: Any, steps: int) -> tuple[Any, list[float]]:
        """The state after steps on one batch, and the loss before each."""
        losses = []
        for _ in range(steps):
            state, metrics = step(state, self.batch(0))
            losses.append(float(metrics["loss"]))
        return state, losses

    def sent(self, step: Any) -> collections.Counter[tuple[Any, ...]]:
        """What a compiled step sends: how often which operation, dtype, axis and bytes."""
        found = wire.collectives(step, self.mesh)
        return collections.Counter((x.op, x.dtype, x.axis, x.operand_bytes) for x in found)

    def sent_alone(self, tx: optax.GradientTransformation) -> collections.Counter[tuple[Any, ...]]:
        """What a step sends whose optimizer exchanges nothing: the model's own."""
        with (
            jax.set_mesh(self.mesh),
            # Such a step is refused.
            mock.patch("onebit_jax.sharding.worker_step.check_replicas_of_step"),
        ):
            return self.sent(self.begin(tx)[1])

    def added(self, tx: optax.GradientTransformation, to: optax.GradientTransformation) -> Any:
        """What a step sends that it does not with another optimizer."""
        with jax.set_mesh(self.mesh):
            return self.sent(self.begin(tx)[1]) - self.sent(self.begin(to)[1])


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def task(mesh: str, kind: str) -> Task:
    axes = MESHES[mesh]
    made = make_mesh(tuple(axes.values()), tuple(axes), TYPES[kind])

    def entry(names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in axes), None)

    specs = {name: P(*map(entry, entries)) for name, entries in _SPLIT.items()}
    return Task(made, specs, tuple(name for name in axes if name != SLOW))


def copies(x: jax.Array) -> dict[Any, list[np.ndarray]]:
    """What devices hold of an array `[workers, ...]`, by which part of a worker's it is."""
    held: dict[Any, list[np.ndarray]] = {}
    for shard in x.addressable_shards:
        rows = np.asarray(shard.data)
        held.setdefault(str(shard.index[1:]), []).extend(rows)
    return held


def assert_replicas_agree(tree: Any) -> None:
    """Asserts that all devices with the same part of an array hold the same bits of it."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for rows in copies(x).values():
            for row in rows[1:]:
                np.testing.assert_array_equal(row, rows[0], jax.tree_util.keystr(path))


def assert_places_agree(tree: Any) -> None:
    """Asserts that all devices with the same part of one worker's array hold the same bits."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        first: dict[str, np.ndarray] = {}
        for shard in x.addressable_shards:
            held = np.asarray(shard.data)
            expected = first.setdefault(str(shard.index), held)
            np.testing.assert_array_equal(held, expected, jax.tree_util.keystr(path))
