"""Birder, first called BinSGDM: one random bit a parameter, with no warm-up and no scales."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import hierarchical, stochastic, votes
from onebit_jax.collectives.hierarchical import Axes, LocalDtype
from onebit_jax.collectives.layout import Block, block_layout, unpadded
from onebit_jax.collectives.signs import pack_bits, unpack_bits, written_out
from onebit_jax.collectives.stochastic import Ratio, Transport
from onebit_jax.per_worker import PerWorker
from onebit_jax.transforms.phases import Phase

# What a is at least where any worker has ever had a gradient: products of it with the smallest
# uniform number are still normal floats, and a tells by itself that the coordinate is live.
_LEAST_A = 2.0**-100


class ScaleByBirderState(NamedTuple):
    """State of Birder for ``n`` workers, or for ``N`` nodes of ``L`` devices each.

    In the hierarchical form (:mod:`onebit_jax.collectives.hierarchical`) a worker is a node, and
    what a device has of it is its own shard: ``8/L`` bytes a parameter.

    Attributes:
      count: number of updates made; int32 ``[]``.
      key: the key that all random bits come from, with ``count``; uint32 ``[2]``.
      m: the worker's own average of gradients ``m_i``; float32, a tree like the parameters,
        ``[1, *shape]``, in the hierarchical form ``[1, *shape of a shard]``. On a single node, of
        the mean gradient, ``[1, *shape]``.
      a: the worker's own average of their absolute values ``a_i``, at least ``abs(m)``; as ``m``.
        0 where no worker has had a gradient yet, on all workers alike: coordinates at rest. On
        others at least ``2**-100``.
    """

    count: jax.Array
    key: jax.Array
    m: PerWorker
    a: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase``, always 1: every update is compressed; ``live``, the share of coordinates that
          are not at rest (in the hierarchical form of the own shard, whose padding is); and
          ``certainty``, the mean of ``|m_i| / a_i`` over these: near 1 the signs are those of the
          gradients, near 0 they are coins, and nothing but a smaller learning rate will help.
        """
        total, live, certainty = 0, jnp.float32(0), jnp.float32(0)
        for m, a in zip(jax.tree.leaves(self.m), jax.tree.leaves(self.a), strict=True):
            total += a.size
            live += jnp.sum(a != 0, dtype=jnp.int32)
            certainty += jnp.sum(jnp.where(a != 0, jnp.abs(m) / a, 0.0))
        return {
            "phase": jnp.int32(1),
            "live": live / max(total, 1),
            "certainty": certainty / jnp.maximum(live, 1),
        }


def _least(block: Block, live: jax.Array) -> jax.Array:
    """The least that a may be, where ``live`` (packed) and elsewhere; ``[1, *shape]``."""
    return jnp.where(block.tensor(unpack_bits(live, axis=1))[None], _LEAST_A, 0.0)


def _roused(a: list[jax.Array], news: list[jax.Array], blocks: list[Block]) -> list[jax.Array]:
    """Makes a tell that coordinates are live of which nobody knew (``news``, packed)."""

    def rouse(carry: tuple[jax.Array, list[jax.Array], list[jax.Array]]) -> Any:
        any_news, a, news = carry
        a = [jnp.maximum(x, _least(*own)) for x, *own in zip(a, blocks, news, strict=True)]
        # Bits that stayed the same XLA would unpack before the loop, taken or not.
        return ~any_news, a, [~bits for bits in news]

    # A loop of one turn or none writes over a, and seldom runs: a select would pass over a in every
    # update, and a cond would copy it.
    any_news = functools.reduce(jnp.logical_or, map(jnp.any, news), jnp.bool(False))
    return lax.while_loop(lambda carry: carry[0], rouse, (any_news, a, news))[1]


def scale_by_birder(
    b: jax.typing.ArrayLike = 0.95,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    transport: Transport = "bits",
    requantize: bool = True,
    amsgrad: bool = False,
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes updates of Birder; see :func:`birder`, which adds decay and learning rate.

    Args:
      b: decay of both averages, in [0, 1).
      seed: see :func:`birder`; required.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      transport: see :func:`birder`.
      requantize: see :func:`birder`.
      amsgrad: see :func:`birder`.
      local_dtype: see :func:`birder`.
      bucket_bytes: see :func:`birder`.

    Returns:
      A gradient transformation whose ``init`` and ``update`` run where ``axis_name`` is bound.

    Raises:
      ValueError: as :func:`birder`.
    """
    validation.check_decay("b", b)
    validation.check_seed(seed)
    source = cast(int | jax.Array, seed)
    if transport not in ("bits", "votes"):
        raise ValueError(f"transport={transport!r} must be 'bits' or 'votes'.")
    validation.check_flag("requantize", requantize)
    validation.check_flag("amsgrad", amsgrad)
    validation.check_local_dtype(local_dtype, axis_name)
    validation.check_bucket_bytes(bucket_bytes)
    if transport == "votes" and bucket_bytes is not None:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} must be None for transport='votes': XLA joins sums into "
            f"one. Leave it out, or take transport='bits'."
        )
    b = validation.float32(b)

    def layout(shapes: list[tuple[int, ...]]) -> tuple[Axes, list[Block]]:
        """The axes, and the blocks of what the state has: tensors, or their shards."""
        axes = validation.bound_axes(axis_name)
        if transport == "votes" or not requantize:
            votes.field_bits(axes.nodes)
        shards = shapes if axes.single_node else hierarchical.shard_shapes(shapes, axes)
        return axes, block_layout(shards, axes.nodes)

    def init_fn(params: optax.Params) -> ScaleByBirderState:
        validation.check_parameters(params)
        leaves, tree = jax.tree.flatten(params)
        _, blocks = layout([p.shape for p in leaves])
        dtype = jnp.result_type(source)
        is_key = jnp.ndim(source) == 1 or jnp.issubdtype(dtype, jax.dtypes.prng_key)

        def zeros() -> PerWorker:
            return PerWorker(
                tree.unflatten([jnp.zeros((1, *block.shape), jnp.float32) for block in blocks])
            )

        return ScaleByBirderState(
            count=jnp.zeros([], jnp.int32),
            key=jax.random.bits(source if is_key else jax.random.key(source), (2,), jnp.uint32),
            m=zeros(),
            a=zeros(),
        )

    def averages(
        g: list[jax.Array], state: ScaleByBirderState, least: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The new m, and the new a, which is at least ``least``."""
        old_m, old_a = jax.tree.leaves(state.m), jax.tree.leaves(state.a)
        # One product in each sum, that with the old average, is all that a compiler can round
        # together with it: so m and a are rounded alike, and |m| <= a, wherever they are computed.
        shares = [jnp.abs((1 - b) * y) for y in g]
        m = [
            b * x + jnp.where(y < 0, -share, share)
            for x, y, share in zip(old_m, g, shares, strict=True)
        ]
        a = [
            jnp.maximum(b * x + share, y) for x, y, share in zip(old_a, least, shares, strict=True)
        ]
        if amsgrad:
            a = [jnp.maximum(x, y) for x, y in zip(old_a, a, strict=True)]
        return m, a

    def plain_update(
        grads: list[jax.Array], state: ScaleByBirderState, axes: Axes
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Where nothing is binarised: u, m and a."""
        g = [x[None] for x in lax.pmean([x.astype(jnp.float32) for x in grads], axes.names)]
        least = [
            jnp.where((x != 0) | (y != 0), _LEAST_A, 0.0)
            for x, y in zip(jax.tree.leaves(state.a), g, strict=True)
        ]
        m, a = averages(g, state, least)
        return [jnp.where(y > 0, x / y, 0.0)[0] for x, y in zip(m, a, strict=True)], m, a

    def binarised_update(
        grads: list[jax.Array],
        state: ScaleByBirderState,
        axes: Axes,
        blocks: list[Block],
        phase: Phase | None,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Of signs that nodes exchange: u, m and a."""
        key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
        key = jax.random.fold_in(key, state.count)
        if axes.local is not None:
            key = jax.random.fold_in(key, lax.axis_index(axes.local))
        shapes = [block.shape for block in blocks]
        shards = hierarchical.reduce_scatter(grads, shapes, axes, local_dtype)
        g = [x.astype(jnp.float32)[None] for x in shards]

        def exchange(
            live: list[jax.Array], m: list[jax.Array], a: list[jax.Array]
        ) -> stochastic.Answer:
            """Averages signs drawn from m/a where live, and tells at rest where a is not 0."""
            alive = [unpack_bits(x, axis=1) for x in live]

            def z(block: Block, alive: jax.Array, m: jax.Array, a: jax.Array) -> Ratio:
                m, a = block.chunks(m), block.chunks(a)
                return Ratio(
                    jnp.where(alive, m, jnp.where(a != 0, 1.0, -1.0)), jnp.where(alive, a, 1.0)
                )

            return stochastic.all_reduce(
                [z(*own) for own in zip(blocks, alive, m, a, strict=True)],
                alive,
                key,
                blocks,
                axis_name=axes.node,
                transport=transport,
                requantize=requantize,
                bucket_bytes=bucket_bytes,
            )

        def known() -> list[jax.Array]:
            """What earlier updates found live, packed; the same on all workers."""
            return [
                pack_bits(block.chunks(x) != 0, axis=1)
                for block, x in zip(blocks, jax.tree.leaves(state.a), strict=True)
            ]

        def told() -> list[jax.Array]:
            """And what this update finds live, by an exchange of its own."""
            at_rest = [jnp.zeros((block.workers, *block.plane), jnp.uint8) for block in blocks]
            return [x | y for x, y in zip(known(), exchange(at_rest, g, g).heard, strict=True)]

        if phase is None:
            live = lax.cond(state.count == 0, told, known)
        else:
            live = told() if phase == "warmup" else known()
        # Or XLA would find these bits again wherever they are read, from the old a, over which the
        # new one could then not be written.
        live = written_out(live, axes.node)

        m, a = averages(g, state, [_least(*own) for own in zip(blocks, live, strict=True)])
        answer = exchange(live, m, a)
        news = [x & ~y for x, y in zip(answer.heard, live, strict=True)]
        means = answer.means
        if axes.local is not None:
            gathered = hierarchical.all_gather_sections([*live, *answer.packed], axes)
            live, packed = gathered[: len(blocks)], gathered[len(blocks) :]
            means = stochastic.decode(packed, blocks, requantize=requantize)
        u = [
            unpadded(jnp.where(unpack_bits(x, x.ndim - len(block.plane)), mean, 0.0), grad.shape)
            for block, x, mean, grad in zip(blocks, live, means, grads, strict=True)
        ]
        return u, m, _roused(a, news, blocks)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByBirderState]:
        del params, extra_args
        if phase not in ("warmup", "compression", None):
            raise ValueError(f"phase={phase!r} must be 'warmup', 'compression' or None.")
        state = cast(ScaleByBirderState, state)
        grads, tree = jax.tree.flatten(updates)
        axes, blocks = layout([g.shape for g in grads])
        validation.check_same_tree(
            tree.unflatten([jax.ShapeDtypeStruct(block.shape, jnp.float32) for block in blocks]),
            jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape[1:], m.dtype), state.m.value),
        )
        if axes.single_node:
            u, m, a = plain_update(grads, state, axes)
        else:
            u, m, a = binarised_update(grads, state, axes, blocks, phase)
        u = [x.astype(g.dtype) for x, g in zip(u, grads, strict=True)]
        return tree.unflatten(u), state._replace(
            count=state.count + 1,
            m=PerWorker(tree.unflatten(m)),
            a=PerWorker(tree.unflatten(a)),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def birder(
    learning_rate: optax.ScalarOrSchedule,
    b: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    transport: Transport = "bits",
    requantize: bool = True,
    amsgrad: bool = False,
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Birder, first called BinSGDM: one random bit a parameter, from the first update on.

    With worker :math:`i`'s own gradient :math:`g_i`, and with :math:`m_i = a_i = 0` to begin with,

    .. math::

        \begin{align*}
          m_i &\leftarrow b \, m_i + (1-b) \, g_i \\
          a_i &\leftarrow b \, a_i + (1-b) \, |g_i| \\
          u_i &= Q(m_i / a_i) \\
          u &= Q(\tfrac1n \textstyle\sum_i u_i) \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{align*}

    where :math:`Q(z)` is +1 with probability :math:`(1+z)/2` and -1 otherwise
    (:mod:`onebit_jax.collectives.stochastic`). One decay for both averages keeps
    :math:`|m_i| \le a_i`, so that no scale is sent, nothing is left over to feed back, and no
    warm-up is needed. The averages are each worker's own and are never synchronised.

    Every coordinate moves by exactly :math:`\alpha_t` in every update, in a direction that is as
    random as the gradients are: a schedule must anneal to near 0, or parameters keep trembling at
    the size of the learning rate. It is about as large as Adam's.

    A coordinate that has never had a gradient on any worker, such as the embedding of a token not
    seen yet, is *at rest*: it does not move (but for weight decay). Workers must agree on which
    these are. In the first update they tell each other by an exchange of its own, as large as the
    other one. From then on the bits of coordinates at rest, which would mean nothing, tell of first
    gradients: no byte more is sent, and such a coordinate moves from the next update on.

    In the hierarchical form a worker is a node, and its gradient the mean of its devices'. On a
    single node nothing is binarised: :math:`u = m / a` of the mean gradient, and 0 where there has
    been none.

    ``init`` and ``update`` run where ``axis_name`` is bound, and gradients go in as each worker's
    own, as for :func:`onebit_jax.onebit_adam`. All updates are compressed; the extra argument
    ``phase`` of ``update``, and of the step that :func:`onebit_jax.train_step` makes, says whether
    to include the program of the first update's own exchange: ``"warmup"`` makes that exchange,
    ``"compression"`` leaves it out (given in the first update too, all moves from the second one
    on), and None, the default, makes it in the first update.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b: decay of both averages, in [0, 1).
      weight_decay: decoupled weight decay, multiplied with the learning rate as in
        :func:`optax.adamw`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      seed: an int in [0, 2**32) or a PRNG key, from which all random bits come; required. Workers
        must give the same one; they draw different bits of it.
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: the hierarchical form. Then gradients are
        averaged within a node, each device draws the bits of one part of the node's ratios, and a
        node sends no more than a single worker would
        (:mod:`onebit_jax.collectives.hierarchical`). On a single node no bit is drawn.
      transport: ``"bits"``, an ``all_to_all`` and an ``all_gather`` of one bit a parameter each; or
        ``"votes"``, one ``psum`` of 1, 2, 4 or 8 bits a parameter, for at most 1, 3, 15 and 255
        workers (in the hierarchical form, nodes). Results are the same, bit for bit. Votes are one
        collective in place of two, for up to 8 times the bytes: they pay where latency is what an
        exchange costs.
      requantize: whether to take the second :math:`Q`. Without it :math:`u` is the mean of the
        :math:`u_i`, whose variance falls as :math:`1/n`, as that of :math:`Q` does not; but of
        "bits" the second half then costs as many bits as votes.
      amsgrad: whether :math:`a_i` never falls: the larger one of the old and the new is kept, which
        the paper's theory asks for.
      local_dtype: in the hierarchical form, what gradients are averaged in within a node:
        ``"float32"``, or ``"bfloat16"`` for half the bytes there.
      bucket_bytes: the most that one collective carries from a worker to another (in the
        hierarchical form, from node to node), a multiple of 128; None, the default, for all in one.
        For "bits" only. See :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range or a missing ``seed``, before anything is
        compiled; from ``init`` for parameters that are not real floating-point arrays, an axis that
        is not bound, or more than 255 workers where counts travel; from ``update`` for gradients of
        another tree than the parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> schedule = optax.linear_schedule(0.1, 0.0, 300)
      >>> tx = onebit_jax.birder(schedule, seed=0, axis_name="workers")
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # a row a worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.5))
      (True, True)

    References:
      Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical
      Distributed DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

    Differences from the paper:
      Coordinates at rest do not move; by the paper's formula they would walk by :math:`\alpha_t` in
      every update, at random. On all others :math:`a_i` is kept at :math:`2^{-100}` or above: where
      a worker itself has had no gradient, :math:`u_i` is a fair coin all the same.
    """
    validation.check_learning_rate(learning_rate)
    return optax.chain(
        scale_by_birder(
            b,
            seed=seed,
            axis_name=axis_name,
            transport=transport,
            requantize=requantize,
            amsgrad=amsgrad,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


binsgdm = birder
