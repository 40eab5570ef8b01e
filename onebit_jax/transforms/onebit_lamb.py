"""1-bit LAMB: LAMB while variance and coefficients settle, then one bit a parameter on the wire."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import ec1, hierarchical
from onebit_jax.collectives.fused import Fused, fuse
from onebit_jax.collectives.hierarchical import Axes, LocalDtype
from onebit_jax.collectives.layout import Block, Live, block_layout, mark_live, row_bytes
from onebit_jax.per_worker import PerWorker
from onebit_jax.transforms import phases
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.fold import LEAST, SUM, fold
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.warmup import VarianceStable


class ScaleByOnebitLambState(NamedTuple):
    """State of 1-bit LAMB for ``n`` workers and ``P`` parameter tensors.

    The tensors travel end to end in one block, padded to ``[n, 8, B]`` (chunk, bit, byte), and what
    the exchange writes is held in that shape. Two arrays change their meaning at the first
    compressed update, since neither phase needs all four. Fields inside a
    :class:`~onebit_jax.PerWorker` are each worker's own; all others are equal on all workers, bit
    for bit. In the hierarchical form (:mod:`onebit_jax.collectives.hierarchical`), with ``N`` nodes
    of ``L`` devices each, the block's chunks are those of ``L`` shards in turn, ``N`` of each.

    Attributes:
      count: number of updates made; int32 ``[]``.
      frozen_at: number of updates made when v froze, -1 in warm-up; int32 ``[]``.
      m_then_compensated: the momenta ``m_l`` in warm-up (then equal on all workers), the worker's
        compensated scaled momenta ``c_i`` in compression; float32 ``[1, n, 8, B]``. In the
        hierarchical form ``[1, L, N, 8, B]``, and ``c_i``, of the device's own shard, takes the
        place of the first one; on a single node, where nothing is compressed, the scaled momenta.
      worker_scale: the worker's own scale ``s_i``, 0 in warm-up; float32 ``[1, 1]``. The residual
        ``e_i`` is ``c_i - s_i sgn(c_i)``.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` in compression,
        with 0 for dead coordinates; float32, a tree like the parameters.
      fresh_variance: 0 in warm-up, ``k_l^2 v~_l`` in compression, with the sign of the momentum:
        the passes over single tensors take it from here, since bits of a fused block do not fall
        on a tensor's bounds. Of no meaning for dead coordinates; float32 ``[n, 8, B]``.
      served: the compensated mean ``a_j`` of the chunk that this worker serves; float32
        ``[1, 8, B]``. The residual ``E_j`` is ``a_j - S_j sgn(a_j)``, with the scale ``S_j`` in
        row ``j`` of ``received``, or of the device's own shard's ``N`` rows.
      live: which coordinates are not dead, from the first compressed update on; in the hierarchical
        form those of the device's own shard, in a ``PerWorker``.
      received: the scaled momenta in compression, as the signs and scales that the last exchange
        brought; uint8 ``[n, bytes of a row]``.
      coefficients: running coefficients ``c~_l``, 0 where there never was one; float32 ``[P]``.
      ratios: the last ratios ``r_l``, 1 in warm-up; float32 ``[P]``.
      momentum_scales: ``k_l``, 1 in warm-up; float32 ``[P]``.
      v_norms: the last values of ``||v_t||_1``, that of update ``t`` at ``t`` modulo the length;
        float32.
      variance_ratio: ``||v_t||_1 / ||v_{t-D}||_1`` of the last dense update, 0 while there is none;
        float32 ``[]``.
    """

    count: jax.Array
    frozen_at: jax.Array
    m_then_compensated: PerWorker
    worker_scale: PerWorker
    v_then_inverse_root: Any
    fresh_variance: jax.Array
    served: PerWorker
    live: Any
    received: jax.Array
    coefficients: jax.Array
    ratios: jax.Array
    momentum_scales: jax.Array
    v_norms: jax.Array
    variance_ratio: jax.Array

    def own_live(self) -> Live:
        """Which coordinates of what this worker compresses are not dead."""
        if isinstance(self.live, PerWorker):
            return jax.tree.map(lambda x: x[0], self.live.value)
        return self.live

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update (0 dense, 1 compressed), ``frozen_at`` and
          ``variance_ratio`` as in the state; ``residual_ratio``, the norm of the worker's residual
          over that of the scaled momentum (in the hierarchical form over that of an average shard
          of it), 0 where nothing is compressed; and least, mean and greatest over the
          tensors of the running coefficient (``coefficient_min``, ...) and of the last ratio
          (``ratio_min``, ...). A ratio that stays at its bound says that the variance has left
          what was frozen behind.
        """
        compressing = self.frozen_at >= 0
        live, c = self.own_live(), self.m_then_compensated.value
        if isinstance(self.live, PerWorker):
            c = c[:, 0]
        whole = block_layout([(self.fresh_variance.size,)], self.received.shape[0])[0]
        _, scales = whole.split(self.received)
        squares = jnp.mean((scales**2).reshape(-1, live.counts.size), 0)
        squared_momentum = jnp.sum(squares * live.counts)
        feedback = ec1.Feedback([c], self.worker_scale.value[0], [], self.received)
        block = block_layout([(c.size,)], live.counts.shape[0])[0]
        residual = ec1.worker_residuals(feedback, [live], [block])[0]
        measured = compressing & (squared_momentum > 0)
        ratio = jnp.sqrt(jnp.sum(residual**2) / jnp.where(measured, squared_momentum, 1.0))
        metrics = {
            "phase": (compressing & (self.count > self.frozen_at)).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "variance_ratio": self.variance_ratio,
            "residual_ratio": jnp.where(measured, ratio, 0.0),
        }
        sizes = [x.size for x in jax.tree.leaves(self.v_then_inverse_root)]
        if filled := [i for i, size in enumerate(sizes) if size]:
            for name, values in (("coefficient", self.coefficients), ("ratio", self.ratios)):
                of_tensors = values[jnp.array(filled)]
                for f in (jnp.min, jnp.mean, jnp.max):
                    metrics[f"{name}_{f.__name__}"] = f(of_tensors)
        return metrics


def _once(first: jax.Array, f: Callable[..., Any], over: Any, *reads: Any) -> Any:
    """``f(over, *reads)``, to be written over ``over``, where ``first`` is true; else ``over``.

    A loop of one turn or none does so in place; a cond would copy what it passes on.
    """

    def turn(carry: Any) -> Any:
        # The barrier ties what is read to the carry: XLA would work out ahead of the loop, and so
        # in every step, whatever does not change in it.
        (first, over), tied = lax.optimization_barrier((carry, reads))
        return ~first, f(over, *tied)

    return lax.while_loop(lambda carry: carry[0], turn, (first, over))[1]


def _columns(rows: Sequence[tuple[jax.Array, ...]], count: int) -> list[jax.Array]:
    """Of a tuple of scalars for each tensor, each scalar for all tensors; float32 ``[P]``."""
    return [jnp.array([row[i] for row in rows], jnp.float32) for i in range(count)]


def scale_by_onebit_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    scale: ec1.Scale = "rms",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit LAMB; see :func:`onebit_lamb`, which adds the learning rate.

    Weight decay is in here, since LAMB's coefficients are taken of updates that contain it. For the
    same reason ``update`` needs the parameters.

    Args:
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: see :func:`onebit_lamb`.
      mask: see :func:`onebit_lamb`.
      warmup: when v freezes; see :func:`onebit_lamb`.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      coeff_beta: decay of the running coefficient, in [0, 1).
      min_coeff: least coefficient.
      max_coeff: greatest coefficient.
      min_ratio: least ratio, at most 1.
      max_ratio: greatest ratio, at least 1.
      ratio_threshold: by how much of itself a ratio may change in an update, in (0, 1).
      scale: the compressor's scale; see :func:`onebit_jax.collectives.ec1.all_reduce`.
      local_dtype: see :func:`onebit_lamb`.
      bucket_bytes: see :func:`onebit_lamb`.

    Returns:
      A gradient transformation whose ``init`` and ``update`` run where ``axis_name`` is bound.

    Raises:
      ValueError: as :func:`onebit_lamb`.
    """
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    validation.check_weight_decay(weight_decay)
    warmup_end.check_warmup(warmup)
    validation.check_decay("coeff_beta", coeff_beta)
    validation.check_coefficient_bounds(min_coeff, max_coeff)
    validation.check_ratio_bounds(min_ratio, max_ratio, ratio_threshold)
    validation.check_scale(scale)
    validation.check_local_dtype(local_dtype, axis_name)
    validation.check_bucket_bytes(bucket_bytes)

    b1, b2, eps, coeff_beta = map(validation.float32, (b1, b2, eps, coeff_beta))
    min_coeff, max_coeff = map(validation.float32, (min_coeff, max_coeff))
    min_ratio, max_ratio = map(validation.float32, (min_ratio, max_ratio))
    ratio_threshold = validation.float32(ratio_threshold)

    def layout(leaves: Sequence[jax.Array]) -> tuple[Fused, Block, Axes]:
        """The whole block, what of it a device compresses, and the axes."""
        axes = validation.bound_axes(axis_name)
        fused = fuse([x.shape for x in leaves], axes.workers)
        return fused, block_layout([(fused.block.size // axes.per_node,)], axes.nodes)[0], axes

    def decay_rates(params: optax.Params, count: jax.Array) -> list[Any]:
        """The weight decay of each tensor; 0.0 where it is off."""
        rate = validation.float32(weight_decay(count) if callable(weight_decay) else weight_decay)
        chosen = True if mask is None else mask(params) if callable(mask) else mask
        return jax.tree.leaves(
            jax.tree.map(
                lambda on, part: jax.tree.map(lambda _: rate if on else 0.0, part), chosen, params
            )
        )

    def decayed(q: jax.Array, p: jax.Array, rate: Any) -> jax.Array:
        off = isinstance(rate, float) and rate == 0
        return q if off else q + rate * p.astype(jnp.float32)

    def init_fn(params: optax.Params) -> ScaleByOnebitLambState:
        validation.check_parameters(params)
        leaves = jax.tree.leaves(params)
        fused, own, axes = layout(leaves)
        held = hierarchical.held_shape((own.workers, 8, own.chunk_bytes), axes)
        no_live = mark_live(jnp.zeros((own.workers, 8, own.chunk_bytes), bool))
        return ScaleByOnebitLambState(
            count=jnp.zeros([], jnp.int32),
            frozen_at=jnp.full([], -1, jnp.int32),
            m_then_compensated=PerWorker(jnp.zeros((1, *held), jnp.float32)),
            worker_scale=PerWorker(jnp.zeros((1, 1), jnp.float32)),
            v_then_inverse_root=optax.tree.zeros_like(params, dtype=jnp.float32),
            fresh_variance=jnp.zeros(fused.shape, jnp.float32),
            served=PerWorker(jnp.zeros((1, 8, fused.block.chunk_bytes), jnp.float32)),
            live=hierarchical.of_shards(no_live, axes),
            received=jnp.zeros((fused.block.workers, row_bytes([fused.block])), jnp.uint8),
            coefficients=jnp.zeros((len(leaves),), jnp.float32),
            ratios=jnp.ones((len(leaves),), jnp.float32),
            momentum_scales=jnp.ones((len(leaves),), jnp.float32),
            v_norms=jnp.zeros((warmup_end.record_length(warmup, b2),), jnp.float32),
            variance_ratio=jnp.zeros([], jnp.float32),
        )

    def warmup_update(
        rates: list[Any],
        grads: list[jax.Array],
        params: list[jax.Array],
        state: ScaleByOnebitLambState,
    ) -> tuple[list[jax.Array], ScaleByOnebitLambState]:
        t = state.count + 1
        fused, _, axes = layout(grads)
        joined = fused.join([x.astype(jnp.float32) for x in grads])
        g = lax.pmean(joined, axes.names)
        held = state.m_then_compensated.value
        m = b1 * held + (1 - b1) * g.reshape(held.shape)
        old_v, tree = jax.tree.flatten(state.v_then_inverse_root)
        v = [b2 * x + (1 - b2) * y**2 for x, y in zip(old_v, fused.cut(g), strict=True)]

        def update(m: jax.Array, v: jax.Array, p: jax.Array, rate: Any) -> jax.Array:
            return decayed(m / (jnp.sqrt(v) + eps), p, rate)

        def terms(rate: Any, m: jax.Array, v: jax.Array, p: jax.Array) -> tuple[jax.Array, ...]:
            return p.astype(jnp.float32) ** 2, update(m, v, p, rate) ** 2, v

        tensors = list(zip(fused.cut(m), v, params, strict=True))
        sums = [
            fold(functools.partial(terms, rate), arrays, SUM, SUM, SUM)
            for rate, arrays in zip(rates, tensors, strict=True)
        ]
        squared_p, squared_u, v_sums = _columns(sums, 3)
        v_norm = jnp.sum(v_sums)
        v_norms, ratio = warmup_end.observe(warmup, state.v_norms, v_norm, t, b2)
        # Nothing that is not finite is frozen.
        frozen = warmup_end.ends(warmup, t, ratio) & jnp.isfinite(v_norm)
        defined = (squared_p > 0) & (squared_u > 0)
        c = jnp.sqrt(squared_p) / jnp.sqrt(jnp.where(defined, squared_u, 1.0))
        c = jnp.where(defined, jnp.clip(c, min_coeff, max_coeff), 1.0)
        running = coeff_beta * state.coefficients + (1 - coeff_beta) * c
        u = [
            c[i] * update(*arrays, rate)
            for i, (arrays, rate) in enumerate(zip(tensors, rates, strict=True))
        ]
        return u, state._replace(
            count=t,
            frozen_at=jnp.where(frozen, t, -1),
            m_then_compensated=PerWorker(m),
            v_then_inverse_root=tree.unflatten(v),
            coefficients=jnp.where(c == 1, state.coefficients, running),
            v_norms=v_norms,
            variance_ratio=ratio,
        )

    def freeze(carry: Any, m: jax.Array) -> Any:
        """What the first compressed update starts from: b1 k m, 1/(sqrt(v)+eps), live and k."""
        zeros, v, _, _ = carry
        fused, own, axes = layout(v)
        inverse_roots = [jnp.where(x > 0, 1 / (jnp.sqrt(x) + eps), 0.0) for x in v]

        def terms(m: jax.Array, inverse_root: jax.Array) -> tuple[jax.Array, ...]:
            alive = inverse_root > 0
            return jnp.where(alive, m**2, 0.0), alive.astype(jnp.float32)

        tensors = list(zip(fused.cut(m), inverse_roots, strict=True))
        squared_m, counts = _columns([fold(terms, x, SUM, SUM) for x in tensors], 2)
        sigma = jnp.sqrt(squared_m / jnp.maximum(counts, 1))
        moving = sigma > 0
        mean = jnp.sum(sigma) / jnp.maximum(jnp.sum(moving), 1)
        k = jnp.where(moving, mean / jnp.where(moving, sigma, 1.0), 1.0)
        b1_k_m = fused.join([b1 * k[i] * x for i, (x, _) in enumerate(tensors)], onto=zeros)
        alive = fused.join([x > 0 for x in inverse_roots])
        live = mark_live(hierarchical.own_shard(alive, (own.workers, *alive.shape[1:]), axes))
        return b1_k_m, inverse_roots, hierarchical.of_shards(live, axes), k

    def next_momenta(
        g: jax.Array,
        held: jax.Array,
        first: jax.Array,
        state: ScaleByOnebitLambState,
        fused: Fused,
        axes: Axes,
    ) -> tuple[jax.Array, jax.Array, ScaleByOnebitLambState]:
        """What the last F and the new one are made of: bits and scales, or F itself."""
        if axes.single_node:
            last = held.reshape(fused.shape)
            new = jnp.where(first, 1.0, b1) * last + (1 - b1) * lax.pmean(g, axes.names)
            return last, new, state._replace(m_then_compensated=PerWorker(new.reshape(held.shape)))
        last = state.received
        [held] = hierarchical.own_shard_first([held], first, axes)
        compensated = hierarchical.first(held, axes)
        rows = compensated.shape[-3:]
        [g] = hierarchical.reduce_scatter([g], [rows], axes, local_dtype)
        received = hierarchical.own_shard(last, (rows[0], last.shape[1]), axes)
        blocks = block_layout([(compensated.size,)], rows[0])
        [before] = ec1.decode(received, blocks)
        feedback = ec1.all_reduce(
            [b1 * before + (1 - b1) * g],
            ec1.Feedback(
                [compensated], state.worker_scale.value[0], [state.served.value], received
            ),
            [state.own_live()],
            blocks,
            axis_name=axes.node,
            scale=scale,
            bucket_bytes=bucket_bytes,
        )
        new = hierarchical.all_gather(feedback.received, axes).reshape(last.shape)
        held = hierarchical.with_first(held, feedback.compensated[0], axes)
        return (
            last,
            new,
            state._replace(
                m_then_compensated=PerWorker(held),
                worker_scale=PerWorker(feedback.scales[None]),
                served=PerWorker(feedback.served[0]),
                received=new,
            ),
        )

    def decoded(momenta: jax.Array, fused: Fused) -> jax.Array:
        """F, from what :func:`next_momenta` says that it is made of."""
        return momenta if momenta.dtype == jnp.float32 else ec1.decode(momenta, [fused.block])[0]

    def layerwise_update(
        rates: list[Any],
        params: list[jax.Array],
        momenta: jax.Array,
        fresh: jax.Array,
        inverse_roots: list[jax.Array],
        state: ScaleByOnebitLambState,
        fused: Fused,
    ) -> tuple[list[jax.Array], jax.Array]:
        """The updates and the new ratios ``r``."""
        inverse_k = 1 / state.momentum_scales
        # |m|: of one value within a scale's part of the block. Its sign is that of the variance.
        if momenta.dtype == jnp.float32:
            sizes = [inverse_k[i] * jnp.abs(x) for i, x in enumerate(fused.cut(momenta))]
        else:
            _, scales = fused.block.split(momenta)
            sizes = [fused.spread(scales * inverse_k[i], i) for i in range(len(params))]
        tensors = list(zip(fused.cut(fresh), inverse_roots, sizes, strict=True))

        def momentum_over_root(
            fresh: jax.Array, inverse_root: jax.Array, size: jax.Array
        ) -> jax.Array:
            return jnp.where(jnp.signbit(fresh), -size, size) * inverse_root

        def terms(
            rate: Any,
            inverse_k: jax.Array,
            fresh: jax.Array,
            inverse_root: jax.Array,
            size: jax.Array,
            p: jax.Array,
        ) -> tuple[jax.Array, ...]:
            q = momentum_over_root(fresh, inverse_root, size)
            u = decayed(q, p, rate)
            fresh_root = jnp.sqrt(jnp.abs(fresh)) * inverse_k + eps
            least = jnp.where(inverse_root > 0, inverse_root * fresh_root, math.inf)
            return q**2, u**2, least

        folded = [
            fold(functools.partial(terms, rate, inverse_k[i]), (*arrays, p), SUM, SUM, LEAST)
            for i, (rate, arrays, p) in enumerate(zip(rates, tensors, params, strict=True))
        ]
        squared_q, squared_u, least = _columns(folded, 3)
        f = jnp.where(jnp.isfinite(least), 1 / least, 1.0)
        w = jnp.sqrt(squared_q / jnp.where(squared_u > 0, squared_u, 1.0))
        w = jnp.where(squared_u > 0, jnp.minimum(w, 1.0), 1.0)
        f = jnp.clip(f * w + 1 - w, min_ratio, max_ratio)
        bounds = [state.ratios * (1 + sign * ratio_threshold) for sign in (-1, 1)]
        ratios = jnp.clip(f, *bounds)
        factors = jnp.where(state.coefficients > 0, state.coefficients, 1.0) * ratios
        u = [
            factors[i] * decayed(momentum_over_root(*arrays), p, rate)
            for i, (rate, arrays, p) in enumerate(zip(rates, tensors, params, strict=True))
        ]
        return u, ratios

    def compressed_update(
        rates: list[Any],
        grads: list[jax.Array],
        params: list[jax.Array],
        state: ScaleByOnebitLambState,
    ) -> tuple[list[jax.Array], ScaleByOnebitLambState]:
        fused, _, axes = layout(grads)
        v, tree = jax.tree.flatten(state.v_then_inverse_root)
        first = state.count == state.frozen_at
        m = state.m_then_compensated.value
        fresh, inverse_roots, live, k = _once(
            first, freeze, (state.fresh_variance, v, state.live, state.momentum_scales), m
        )
        state = state._replace(live=live, momentum_scales=k)
        # At the first update there is no F of the last one, and b1 k m is where it belongs already:
        # in place of c with a scale of 0, hence as a residual, and in place of the fresh variance.
        held = _once(first, lambda m, b1_k_m: b1_k_m.reshape(m.shape), m, fresh)
        g = fused.join([k[i] * x.astype(jnp.float32) for i, x in enumerate(grads)])
        last, new, state = next_momenta(g, held, first, state, fused, axes)
        gradient_factor = (1 - b2) / (1 - b1) ** 2

        def first_fresh(
            b1_k_m: jax.Array, new: jax.Array, inverse_roots: list[jax.Array], k: jax.Array
        ) -> jax.Array:
            v = [
                jnp.where(x > 0, k[i] * (1 / x - eps), 0.0) ** 2
                for i, x in enumerate(inverse_roots)
            ]
            return b2 * fused.join(v) + gradient_factor * (decoded(new, fused) - b1_k_m) ** 2

        fresh = _once(first, first_fresh, fresh, new, inverse_roots, k)
        F = decoded(new, fused)
        later = b2 * jnp.abs(fresh) + gradient_factor * (F - b1 * decoded(last, fused)) ** 2
        fresh = jnp.copysign(jnp.where(first, fresh, later), F)
        u, ratios = layerwise_update(rates, params, new, fresh, inverse_roots, state, fused)
        return u, state._replace(
            count=state.count + 1,
            v_then_inverse_root=tree.unflatten(inverse_roots),
            fresh_variance=fresh,
            ratios=ratios,
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByOnebitLambState]:
        del extra_args
        state = cast(ScaleByOnebitLambState, state)
        if params is None:
            raise ValueError(
                "params=None, but LAMB's coefficients are ratios to the parameters' norms: call "
                "update(gradients, state, params)."
            )
        validation.check_same_tree(updates, state.v_then_inverse_root)
        validation.check_same_tree(params, state.v_then_inverse_root)
        grads, tree = jax.tree.flatten(updates)
        compressing = state.frozen_at >= 0
        rates = decay_rates(params, state.count)
        u, new_state = phases.choose(
            phase,
            compressing,
            functools.partial(warmup_update, rates),
            functools.partial(compressed_update, rates),
            grads,
            jax.tree.leaves(params),
            state,
        )
        u = [x.astype(g.dtype) for x, g in zip(u, grads, strict=True)]
        return tree.unflatten(u), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    scale: ec1.Scale = "rms",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB: layerwise step sizes for large batches, at one bit a parameter after a warm-up.

    With worker :math:`i`'s own gradient :math:`g_i`, and for each parameter tensor :math:`l` with
    :math:`m_0 = v_0 = \tilde c = 0`, an update in warm-up is LAMB's on the mean gradient,

    .. math::

        \begin{align*}
          g &= \tfrac1n \textstyle\sum_i g_i, \quad
          m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
          v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          u &= m / (\sqrt v + \varepsilon) + \lambda p, \quad
          c = \mathrm{clip}(\|p\| / \|u\|, c_{\min}, c_{\max}) \\
          \tilde c &\leftarrow \beta_3 \tilde c + (1-\beta_3) c, \quad
          p \leftarrow p - \alpha_t \, c \, u
        \end{align*}

    where :math:`c` is 1, and :math:`\tilde c` stays, if either norm is 0. Then :math:`v` and
    :math:`\tilde c` freeze, and a fresh variance :math:`\tilde v`, at first :math:`v`, goes on. The
    workers' momenta are averaged by the error-compensated one-bit all-reduce
    (:mod:`onebit_jax.collectives.ec1`), the whole model in one block, to which every tensor is
    brought at the same root mean square :math:`\sigma` of its last dense momentum:

    .. math::

        \begin{align*}
          k_l &= \mathrm{mean}_{l'}(\sigma_{l'}) / \sigma_l, \quad
          F = \mathrm{EC1}_i(k_l (\beta_1 m_l + (1-\beta_1) g_{i,l})), \quad
          m_l' = F_l / k_l \\
          \hat g &= (m' - \beta_1 m) / (1-\beta_1), \quad
          \tilde v \leftarrow \beta_2 \tilde v + (1-\beta_2) \hat g^2, \quad m \leftarrow m' \\
          q &= m / (\sqrt v + \varepsilon), \quad u = q + \lambda p, \quad
          w = \min(1, \|q\| / \|u\|) \\
          f &= w \max \frac{\sqrt v + \varepsilon}{\sqrt{\tilde v} + \varepsilon} + 1 - w, \quad
          r \leftarrow \mathrm{clip}(\mathrm{clip}(f, r_{\min}, r_{\max}),
            r (1-\delta), r (1+\delta)) \\
          p &\leftarrow p - \alpha_t \, \tilde c \, r \, u
        \end{align*}

    A coordinate whose :math:`v` is exactly 0 when it freezes is *dead*, as in
    :func:`onebit_jax.onebit_adam`: it does not move any more (but for weight decay), and neither
    :math:`\sigma` nor the maximum regards it. Where to run ``init`` and ``update``, whose gradients
    they take, and the extra argument ``phase`` are as there, too; ``update`` needs the parameters.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of both variances, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decay :math:`\lambda`, of at least 0, or a schedule of the number of updates
        made. It is part of what the coefficient is taken of, as in :func:`optax.lamb`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      warmup: the number of dense updates (an int, at least 1), or
        :func:`onebit_jax.variance_stable`. Take one long enough for the coefficients to settle,
        too: ``coeff_beta`` averages over the last ten.
      axis_name: the axis that the workers run along; or, for the hierarchical form, the pair
        ``(node_axis, local_axis)``, as for :func:`onebit_jax.onebit_adam`. On a single node nothing
        is compressed: momenta are averaged at full precision.
      coeff_beta: decay :math:`\beta_3` of the running coefficient, in [0, 1).
      min_coeff: least coefficient, above 0.
      max_coeff: greatest coefficient. The paper takes 0.3 for BERT.
      min_ratio: least ratio, at most 1.
      max_ratio: greatest ratio, at least 1.
      ratio_threshold: share :math:`\delta` by which a ratio may change in an update, in (0, 1).
      scale: the compressor's scale, ``"rms"`` (the paper's) or ``"mean_abs"``.
      local_dtype: in the hierarchical form, what compressed steps average gradients in within a
        node: ``"float32"``, or ``"bfloat16"`` for half the bytes there.
      bucket_bytes: the most that one collective carries from a worker to another, a multiple of
        128; None, the default, for all in one. See :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` without parameters, and for gradients of another tree than the
        parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> schedule = optax.linear_schedule(0.1, 0.0, 300)
      >>> tx = onebit_jax.onebit_lamb(schedule, warmup=50, axis_name="workers")
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.ones((4, 2))  # a row a worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Li et al., `1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
      Convergence Speed <https://arxiv.org/abs/2104.06069>`_, HiPC 2022.

    Differences from the paper:
      Dead coordinates do not move, :math:`\sigma` is taken over the others, and a tensor whose
      momentum is 0 has :math:`k = 1` and no part in the mean: the paper's formulas would divide by
      zero. A tensor that never had a coefficient other than 1 keeps 1, where :math:`\tilde c = 0`
      would stop it. The end of warm-up can be left to :func:`onebit_jax.variance_stable`.
    """
    validation.check_learning_rate(learning_rate)
    return optax.chain(
        scale_by_onebit_lamb(
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            warmup=warmup,
            axis_name=axis_name,
            coeff_beta=coeff_beta,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            min_ratio=min_ratio,
            max_ratio=max_ratio,
            ratio_threshold=ratio_threshold,
            scale=scale,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
