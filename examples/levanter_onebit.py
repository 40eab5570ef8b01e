"""1-bit Adam in Levanter: a line of its configuration, and a trainer that sees own gradients.

    optimizer: {type: onebit_adam, learning_rate: 1e-3, axis: replica_dcn}
    trainer: {mesh: {compute_mapping: {batch: [replica, data]}}}

`axis` is the slow axis of Levanter's mesh, and is left out of what a batch is split over. In place
of `Trainer(config.trainer, optimizer, loss_fn)` write

    ReplicaTrainer(config.trainer, optimizer, loss_fn, axis="replica_dcn")

Levanter's own computes gradients that are averaged over all replicas already. This one computes
those of each replica apart; all else is Levanter's, and bits alone cross the slow axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import haliax  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import optax
from haliax.partitioning import pspec_for  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from levanter.optim.config import OptimizerConfig  # pyright: ignore[reportMissingImports]
from levanter.trainer import Trainer  # pyright: ignore[reportMissingImports]

import onebit_jax
from onebit_jax.sharding import on_mesh


@OptimizerConfig.register_subclass("onebit_adam")
@dataclasses.dataclass(frozen=True)
class OnebitAdam(OptimizerConfig):
    """1-bit Adam as `optimizer.type`; fields besides Levanter's are those of its Adam."""

    axis: str = "replica_dcn"
    """The slow axis of the mesh."""
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    """The norm at which the gradients of all replicas are clipped by one factor."""
    onebit_warmup: int | None = None
    """Steps of its own warm-up; None: it ends by itself."""

    def build(self, num_train_steps: int) -> Any:
        """The optimizer, before it is put on a mesh."""
        ends: dict[str, Any] = {} if self.onebit_warmup is None else {"warmup": self.onebit_warmup}
        tx = onebit_jax.onebit_adam(
            self.lr_scheduler(num_train_steps),
            *(self.beta1, self.beta2, self.epsilon),
            weight_decay=self.weight_decay,
            axis_name=self.axis,
            **ends,
        )
        if not self.max_grad_norm:
            return tx
        return optax.chain(onebit_jax.clip_by_common_norm(self.max_grad_norm, self.axis), tx)


_ROWS = "replicas"


def _is_named(x: Any) -> bool:
    return isinstance(x, haliax.NamedArray)


class OnReplicas:
    """An optimizer for gradients with a row for each replica, of parameters that all have alike.

    Args:
      tx: of the library.
      mesh: Levanter's.
      axis: its slow axis.
      mapping: from the names of parameters' axes to the mesh's.

    Attributes:
      axes: from the names of its state's axes to the mesh's; known once it was initialised.
    """

    def __init__(self, tx: optax.GradientTransformation, mesh: Mesh, axis: str, mapping: Any):
        self.axes = {_ROWS: axis}
        self._tx, self._mesh, self._axis, self._mapping = tx, mesh, axis, mapping

    def init(self, params: Any) -> Any:
        """The state, every leaf with a row for each replica and axes that have names."""
        specs = self._specs(params)
        on_mesh: Any = self._on_mesh(specs)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self._mesh, spec))
            for x, spec in zip(jax.tree.leaves(params), specs, strict=True)
        ]
        # Levanter keeps sharded only what has names, and XLA knows how the state lies.
        shardings = jax.jit(on_mesh.init).lower(shapes).compile().output_shardings
        replicas = self._mesh.shape[self._axis]

        def named(x: jax.Array, sharding: NamedSharding) -> Any:
            entries = (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
            names = [f"{_ROWS}.{i}.{entry}" for i, entry in enumerate(entries)]
            self.axes |= {name: e for name, e in zip(names, entries, strict=True) if e is not None}
            rows = jnp.broadcast_to(x[None], (replicas, *x.shape))
            return haliax.NamedArray(rows, (_ROWS, *names))

        return jax.tree.map(named, on_mesh.init(jax.tree.leaves(params)), shardings)

    def update(self, updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        """Updates that are the same on all replicas, of gradients that are not."""
        # Levanter hands over its loss, for optimizers that want it.
        del others
        specs = self._specs(params)
        mapped = jax.vmap(
            cast(Any, self._on_mesh(specs)).update, in_axes=(0, 0, None), spmd_axis_name=self._axis
        )
        rows = jax.tree.map(lambda x: x.array, state, is_leaf=_is_named)
        updates, new = mapped(jax.tree.leaves(updates), rows, jax.tree.leaves(params))
        # Each replica takes its own, and nothing crosses between them.
        own = jax.shard_map(
            lambda updates: [x[0] for x in updates],
            mesh=self._mesh,
            in_specs=([P(self._axis, *spec) for spec in specs],),
            out_specs=specs,
            check_vma=False,
        )
        new = jax.tree.map(
            lambda old, x: haliax.NamedArray(x, old.axis_names), state, new, is_leaf=_is_named
        )
        return jax.tree.unflatten(jax.tree.structure(params), own(updates)), new

    def _specs(self, params: Any) -> list[P]:
        named = jax.tree.leaves(params, is_leaf=_is_named)
        return [pspec_for(x, self._mapping) if _is_named(x) else P() for x in named]

    def _on_mesh(self, specs: list[P]) -> optax.GradientTransformationExtraArgs:
        return on_mesh(self._tx, self._mesh, axis_name=self._axis, specs=specs)


class ReplicaTrainer(Trainer):
    """Levanter's trainer, in which every replica along the slow axis sees its own gradients."""

    def __init__(self, config: Any, optimizer: Any, loss_fn: Callable[..., Any], **others: Any):
        self._axis = others.pop("axis", "replica_dcn")
        mapping = config.parameter_axis_mapping
        self._on_replicas = OnReplicas(optimizer, config.device_mesh, self._axis, mapping)
        tx = optax.GradientTransformationExtraArgs(self._on_replicas.init, self._on_replicas.update)
        super().__init__(config, tx, loss_fn, **others)

    @property
    def parameter_axis_mapping(self) -> Any:
        """Levanter's, and that of the optimizer's state."""
        return {**super().parameter_axis_mapping, **self._on_replicas.axes}

    def _compute_gradients_microbatched(
        self, loss_fn: Any, model: Any, *batch: Any, **batch_kwargs: Any
    ) -> Any:
        replicas = self.device_mesh.shape[self._axis]

        def shares(x: jax.Array) -> jax.Array:
            own = x.reshape(replicas, x.shape[0] // replicas, *x.shape[1:])
            whole = [P.UNCONSTRAINED] * (own.ndim - 1)
            sharding = NamedSharding(self.device_mesh, P(self._axis, *whole))
            return jax.lax.with_sharding_constraint(own, sharding)

        key = batch_kwargs.pop("key", None)
        compute = super()._compute_gradients_microbatched

        def of_replica(batch: Any, batch_kwargs: Any, index: jax.Array) -> Any:
            own = {} if key is None else {"key": jax.random.fold_in(key, index)}
            return compute(loss_fn, model, *batch, **batch_kwargs, **own)

        def with_rows(x: Any) -> Any:
            return haliax.NamedArray(x.array, (_ROWS, *x.axis_names)) if _is_named(x) else x

        mapped = jax.vmap(of_replica, spmd_axis_name=self._axis)
        given = jax.tree.map(shares, (batch, batch_kwargs))
        loss, grads, metrics = mapped(given[0], given[1], jnp.arange(replicas))
        loss, metrics = jax.tree.map(lambda x: jnp.mean(x, 0), (loss, metrics))
        grads = jax.tree.map(with_rows, grads, is_leaf=_is_named)
        return loss, grads, metrics
