"""What 1-bit Adam and 1-bit LAMB share: a momentum over a variance that freezes after a warm-up."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.markers import PerWorker
from onebit_jax.transforms import momentum as moments
from onebit_jax.transforms import phases
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.algorithm import PhasedAlgorithm, Step, Update
from onebit_jax.transforms.gradient_mean import GradientMean
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.warmup import Warmup


def first_moment(b1: Any, m: jax.Array, g: jax.Array) -> jax.Array:
    """``m <- b1 m + (1 - b1) g``, in the dtype and the shape of ``m``."""
    return (jnp.multiply(b1, m.astype(jnp.float32)) + (1 - b1) * g.reshape(m.shape)).astype(m.dtype)


def second_moment(b2: Any, v: jax.Array, g: jax.Array) -> jax.Array:
    """``v <- b2 v + (1 - b2) g^2``."""
    return b2 * v + (1 - b2) * g**2


def metrics_of(state: Any) -> dict[str, jax.Array]:
    """The metrics of a state's progress, variance and exchange."""
    parts = (state.progress, state.variance_record, state.momentum.exchange)
    return {name: value for part in parts for name, value in part.metrics().items()}


def diagnostics_of(state: Any) -> dict[str, jax.Array]:
    """``dead_share``, ``variance_at``, and the diagnostics of the exchange."""
    return {
        "dead_share": warmup_end.zero_share(state.v_then_inverse_root),
        "variance_at": state.variance_at,
        **state.momentum.exchange.diagnostics(),
    }


class FrozenVariance(PhasedAlgorithm):
    """An algorithm whose state has at least the fields that :meth:`begin` makes.

    Attributes:
      b1: decay of the momentum.
      b2: decay of the variance.
      warmup: when the variance freezes.
      gradient_mean: averages the gradients of dense updates.
    """

    b1: Any
    b2: Any
    warmup: Warmup
    gradient_mean: GradientMean

    def dense_step(self, state: Any, update: Update) -> Any:
        """The state after an update of the warm-up."""
        raise NotImplementedError

    def compressed_step(self, state: Any, update: Update) -> Any:
        """The state after an update with the frozen variance."""
        raise NotImplementedError

    def before(self) -> Mapping[Phase, Step]:
        """Dense updates."""
        return {"warmup": self.dense_step}

    def after(self) -> Mapping[Phase, Step]:
        """Compressed updates."""
        return {"compression": self.compressed_step}

    def tree(self, state: Any) -> Any:
        """The variance, or its reciprocal root."""
        return state.v_then_inverse_root

    def upcoming(self, state: Any) -> jax.Array:
        """The phases that the warm-up gives."""
        progress = state.progress
        return warmup_end.upcoming(self.warmup, progress.count, progress.frozen_at >= 0)

    def ends(self, state: Any) -> jax.Array:
        """Whether this update is the last of the warm-up."""
        return warmup_end.ends(self.warmup, state)

    def begin(self, params: optax.Params) -> dict[str, Any]:
        """The common fields before the first update, ``m = v = 0``."""
        return {
            "progress": phases.begin(),
            "momentum_decay": jnp.asarray(self.b1, jnp.float32),
            "variance_record": warmup_end.no_record(params),
            "v_then_inverse_root": optax.tree.zeros_like(params, dtype=jnp.float32),
            "momentum": moments.begin(self.exchange.over(params)),
        }

    def bound(self, state: Any) -> BoundExchange:
        """The exchange over the variance's tree."""
        return moments.bound(self.exchange, state.v_then_inverse_root, state.momentum)

    def with_dense_moments(self, exchange: BoundExchange, state: Any, update: Update) -> Any:
        """The state with :func:`first_moment` and :func:`second_moment` of the mean gradient.

        Processes about a quarter of the tensors at a time: otherwise XLA averages all gradients
        into new memory before it uses the first.
        """
        layout, grads = exchange.layout, update.grads
        v, tree = jax.tree.flatten(state.v_then_inverse_root)
        m = list(state.momentum.m_then_compensated.value)
        averaged = self.gradient_mean.compresses
        if averaged:
            grads = self.gradient_mean.average(grads, state.progress.count)
        for places in layout.quarters():
            leaves = [i for place in places for i in layout.leaves_of(place)]

            def moments_of(old: Any, g: Any, places: Any = places, leaves: Any = leaves) -> Any:
                old_m, old_v = old
                if not averaged:
                    g = self.gradient_mean.dense(g)
                pieces = layout.gather_pieces(places, dict(zip(leaves, g, strict=True)))
                new_m = [first_moment(self.b1, *x) for x in zip(old_m, pieces, strict=True)]
                of_v = functools.partial(second_moment, self.b2)
                return new_m, layout.alike(leaves).map(of_v, old_v, g)

            new_m, new_v = overwrite_if(
                update.when,
                moments_of,
                ([m[place] for place in places], [v[i] for i in leaves]),
                [grads[i] for i in leaves],
                axis_names=exchange.axes.names,
            )
            for place, new in zip(places, new_m, strict=True):
                m[place] = new
            for i, new in zip(leaves, new_v, strict=True):
                v[i] = new
        return state._replace(
            v_then_inverse_root=tree.unflatten(v),
            momentum=state.momentum._replace(m_then_compensated=PerWorker(m)),
        )

    def carry(self, state: Any, like: Any) -> moments.Carried:
        """Momentum and residuals."""
        return moments.carry(self.exchange.over(like), state.momentum, state.progress)

    def resume(self, state: Any, carried: Any, like: Any) -> dict[str, Any]:
        """Momentum and residuals."""
        active, decay = state.v_then_inverse_root, state.momentum_decay
        exchange = self.exchange.over(like)
        return {"momentum": moments.resume(exchange, carried, state.progress, active, decay)}
