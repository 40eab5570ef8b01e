"""The exchange beneath every optimizer: averages values over workers, and sends few bits.

:meth:`BoundExchange.mean` is a function of values and residuals::

    exchange = Exchange("data", OneBit()).over(grads)     # inside shard_map, pmap or vmap
    state = exchange.begin()                              # once; no residuals yet
    mean, state, unfit = exchange.mean(grads, state)      # in each step

A call is one ``all_to_all`` and one ``all_gather`` of uint8 for any number of tensors: scales are
sent in the same bytes. Each worker serves one chunk of every tensor: it averages all workers'
values of the chunk, compresses the mean and sends it to all. With ``n`` workers that compress to
``b`` bytes per element, each sends ``2 b (n - 1) / n``. A compressor may have no server: then a
call is one ``all_gather``, of ``b (n - 1)``, and each worker averages all chunks itself.

In the hierarchical form, ``axis_name=(node, local)``, a node's ``L`` devices first average their
values at full precision, and each gets a shard, ``1/L`` of every tensor; devices of the same index
exchange that between nodes; then a node's devices gather the *bits* of all shards. So a node sends
no more than one worker does in the flat form. Within a single node nothing is compressed.

Buckets are for transports that a large message would hold up: then there are as many collectives as
the bytes fill. A bucket depends on its own tensors alone: if a backward pass makes their gradients
one after the other, each bucket travels while the other gradients are computed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, Specs, bound_axes
from onebit_jax.collectives.error_feedback import Compressor, ExchangeState
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.layout import Layout, Pieces, squared, tensor_id, tensor_sums
from onebit_jax.collectives.one_bit import OneBit, ResidualDtype, Scale

BucketBytes = int | Literal["auto"] | None

# The largest message that Gloo, JAX's transport between CPU hosts, sends both ways at once.
_CPU_BUCKET_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """Options of the exchange, the argument ``exchange`` of optimizers.

    Attributes:
      scale: the scale at one bit: ``"rms"`` (root mean square, the papers' choice, and better with
        error feedback) or ``"mean_abs"`` (mean absolute value).
      scale_per: where tensors are split between devices (:mod:`onebit_jax.sharding`), one scale at
        one bit per ``"shard"``, or per ``"tensor"``: each exchange at one bit then sums 16 bytes
        per tensor over the fast axes. At 2, 4 and 8 bits 256 values share a scale.
      residual_dtype: dtype of the arrays that hold residuals, and in a warm-up the momentum:
        ``"float32"``, or ``"bfloat16"``, which takes ``2 + 2/n`` bytes per parameter less. Its
        rounding errors are lost: up to one part in 256 of a value, each step.
      bucket_bytes: the largest message from one worker to another in one collective; None for one
        message. ``"auto"`` is the fastest as measured (docs/performance.md): buckets between CPU
        hosts, whose transport does not send large messages while it receives.

    Raises:
      ValueError: for an invalid option.
    """

    scale: Scale = "rms"
    scale_per: Literal["shard", "tensor"] = "shard"
    residual_dtype: ResidualDtype = "float32"
    bucket_bytes: BucketBytes = "auto"

    def __post_init__(self):
        validation.check_name("scale", self.scale, "rms", "mean_abs")
        validation.check_name("scale_per", self.scale_per, "shard", "tensor")
        validation.check_name("residual_dtype", self.residual_dtype, "float32", "bfloat16")
        if self.bucket_bytes not in (None, "auto"):
            validation.count("bucket_bytes", self.bucket_bytes, 1, "bytes, such as 2**18")

    def at_bits(
        self, axis_name: Any, bits: int, residual_decay: Any = 1.0, *, fused: bool = False
    ) -> "Exchange":
        """The exchange at 1, 2, 4 or 8 bits with error feedback.

        Without error feedback, from 2 bits on, ``residual_decay`` is None. Options of one bit have
        no effect on others.
        """
        if bits == 1:
            options = self.scale, self.scale_per, self.residual_dtype
            return self.of(axis_name, OneBit(*options, residual_decay, fused))
        return self.of(axis_name, KBits(bits, residual_decay))

    def of(self, axis_name: Any, compressor: Compressor) -> "Exchange":
        """The exchange with a given compressor."""
        return Exchange(axis_name, compressor, self.bucket_bytes)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange before it is bound to a tree.

    Attributes:
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      compressor: encodes values as bytes.
      bucket_bytes: as for :class:`ExchangeOptions`.
    """

    axis_name: str | tuple[str, str]
    compressor: Compressor
    bucket_bytes: BucketBytes = "auto"

    def over(self, tree: Any, specs: Specs | None = None) -> "BoundExchange":
        """Binds it to a tree of arrays, or of their shapes, and to the axes bound here.

        Args:
          tree: the tree.
          specs: how it is split over axes that are not those of a mesh, as in a simulation.
        """
        axes = bound_axes(self.axis_name)
        return BoundExchange(self, axes, tree, split=bool(axes.shards or specs))


class BoundExchange:
    """An exchange bound to one tree and to its axes; :meth:`Exchange.over` makes it.

    Attributes:
      axes: the axes that it runs along.
      compressor: encodes values as bytes.
      layout: the layout of the tree.
      compresses: whether there are values to compress, and other workers or nodes.
    """

    def __init__(self, how: Exchange, axes: Axes, tree: Any, *, split: bool):
        self.axes, self.compressor = axes, how.compressor
        chunks = axes.nodes if how.compressor.has_server else 1
        planes, grouping = how.compressor.planes, how.compressor.grouping
        self.layout = Layout(axes, tree, planes, grouping, chunks, split=split)
        self.compresses = bool(self.layout.pieces) and not axes.single_node
        between_cpus = jax.default_backend() == "cpu" and jax.process_count() > 1
        usual = _CPU_BUCKET_BYTES if between_cpus else None
        self._limit = usual if how.bucket_bytes == "auto" else how.bucket_bytes

    # Values.

    def node_mean(self, tree: Any) -> Pieces:
        """The values that an exchange averages, float32, in pieces.

        In the flat form the worker's own, ``[k, *shape]``. In the hierarchical form the mean over
        the node's devices, of this device's shard, ``[k, chunks, planes, *plane]``. On a single
        node, where nothing is compressed, the mean over all workers, ``[k, *shape]``.
        """
        if self.axes.single_node:
            tree = dense_mean(tree, self.axes)
        pieces = self.layout.gather(tree)
        if self.axes.local is None or self.axes.single_node:
            return pieces

        def scatter(piece: Any, x: jax.Array) -> jax.Array:
            # One for each tensor: joining them would cost a pass over memory, and XLA for GPUs
            # joins small ones by itself.
            whole = piece.padded(x)
            summed = lax.psum_scatter(whole, self.axes.local, scatter_dimension=1, tiled=True)
            return summed.reshape(piece.chunked) / self.axes.per_node

        return [scatter(piece, x) for piece, x in zip(self.layout.pieces, pieces, strict=True)]

    # The exchange.

    def all_reduce(self, values: Any, state: Any) -> tuple[jax.Array, Any, jax.Array]:
        """Averages values; :meth:`decode` gives the mean.

        Args:
          values: the workers' values, from :meth:`node_mean`, or like these.
          state: the compressor's state, such as an
            :class:`~onebit_jax.collectives.error_feedback.ExchangeState`, whose residuals are added
            to the values.

        Returns:
          The received bytes, the same on all workers, bit for bit: uint8 ``[n, bytes]``, in the
          hierarchical form ``[L, N, bytes]``. The next state. The id of a tensor of which this
          worker has a value that is not finite, or 0: int32 ``[]``.
        """
        layout, node = self.layout, self.axes.node
        sent, state, sizes = self.compressor.encode(layout, values, state)
        if self.compressor.has_server:
            rows = self._send(lambda rows: lax.all_to_all(rows, node, 0, 0, tiled=True), sent)
            answer, state = self.compressor.serve(layout, rows, state)
            sent = [x[None] for x in answer]
        received = self._send(lambda rows: lax.all_gather(rows[0], node), sent)
        if self.axes.local is not None:
            received = lax.all_gather(received, self.axes.local)
        return received, state, unfit_tensor(sizes, layout.ids)

    def _send(
        self, collective: Callable[[jax.Array], jax.Array], sections: Sequence[jax.Array]
    ) -> jax.Array:
        """All workers' rows: sections ``[chunks, bytes]``, side by side, in buckets."""
        sizes = [x.shape[-1] for x in sections]
        if self._limit is None or sum(sizes) <= self._limit:
            return collective(self.layout.row(sections, None))
        # A server may answer in fewer sections than there are pieces.
        order = [i for i in self.layout.backward_order() if i < len(sections)]
        order += range(len(order), len(sections))
        received: dict[int, Pieces] = {i: [] for i in order}
        rows: Any = ()
        for bucket in buckets_of([sizes[i] for i in order], self._limit):
            parts = [(order[i], start, end) for i, start, end in bucket]
            sent = self.layout.row([sections[i][:, start:end] for i, start, end in parts], None)
            # One after the other: XLA for GPUs would merge them, or start the last one first.
            rows = collective(lax.optimization_barrier((sent, rows))[0])
            first = 0
            for i, start, end in parts:
                received[i].append(rows[:, first : first + end - start])
                first += end - start
        return self.layout.row([part for i in sorted(received) for part in received[i]], None)

    def decode(self, received: jax.Array, *, own_shard: bool = False) -> Pieces:
        """The mean in pieces, float32; of an inactive element undefined.

        Args:
          received: from :meth:`all_reduce`.
          own_shard: whether of this device's shard alone, like what it compresses.
        """
        layout = self.layout
        if own_shard:
            received = layout.shard(received)
        values = self.compressor.decode(layout, received)
        return layout.own(values) if own_shard else layout.uncut(values)

    def mean(self, tree: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        """Averages the workers' trees.

        Args:
          tree: this worker's.
          state: as for :meth:`all_reduce`.

        Returns:
          The mean, a tree, float32, the same on all workers; the next state; and as for
          :meth:`all_reduce` the id of a tensor that is not finite, or 0.
        """
        if self.compresses:
            received, state, unfit = self.all_reduce(self.node_mean(tree), state)
            return self.layout.scatter(self.decode(received)), state, unfit
        mean = dense_mean(tree, self.axes)
        return mean, state, unfit_of(mean)

    def nothing_received(self) -> jax.Array:
        """Bytes like those of :meth:`all_reduce` that decode to zeros at one bit."""
        shards = () if self.axes.local is None else (self.axes.per_node,)
        rows = (*shards, self.axes.nodes)
        if not self.compresses:
            return jnp.zeros((*rows, 1), jnp.uint8)
        signs = jnp.zeros((*rows, self.layout.payload), jnp.uint8)
        return self.layout.row([signs], jnp.zeros((*rows, *self.layout.scale_shape), jnp.float32))

    # The state between calls.

    def init(self) -> Any:
        """The state before the first call; at one bit no element is active yet."""
        return self.compressor.init(self.layout)

    def activate(self, state: ExchangeState, active: Any) -> ExchangeState:
        """Marks the active elements; newly active ones begin with residuals of zero.

        Args:
          state: the state of an exchange at one bit.
          active: a tree of numbers like the tree, above 0 for active elements; the same on all
            workers.
        """
        return cast(OneBit, self.compressor).activate(self.layout, state, active)

    def begin(self, active: Any = None) -> Any:
        """The state before the first call, with active elements as for :meth:`activate`, or all."""
        state = self.init()
        if not isinstance(self.compressor, OneBit) or not self.compresses:
            return state
        return self.activate(state, self.layout.full(1.0) if active is None else active)

    # Shards.

    def of_all_shards(self, cut: Sequence[jax.Array]) -> Pieces:
        """Whole pieces from this device's ``[k, chunks, planes, *plane]``."""
        if self.axes.local is not None:
            cut = [lax.all_gather(x, self.axes.local) for x in cut]
        return self.layout.uncut(cut)

    def own(self, tree: Any) -> Pieces:
        """A tree that all workers share in the pieces that a worker compresses."""
        pieces = self.layout.gather(tree)
        if self.layout.shards == 1:
            return pieces
        return self.layout.shard(self.layout.cut(pieces))


def buckets_of(sizes: Sequence[int], limit: int) -> list[list[tuple[int, int, int]]]:
    """Cuts sections of these many bytes into buckets of at most ``limit``.

    A larger section is cut into equal parts, each a separate bucket; neighbouring smaller ones
    share a bucket.

    Returns:
      Buckets of parts ``(section, start, end)``.

    >>> buckets_of([3, 2, 10, 1], 5)
    [[(0, 0, 3), (1, 0, 2)], [(2, 0, 5)], [(2, 5, 10)], [(3, 0, 1)]]
    """
    buckets: list[list[tuple[int, int, int]]] = [[]]
    left = limit
    for section, size in enumerate(sizes):
        if size <= left:
            buckets[-1].append((section, 0, size))
            left -= size
            continue
        count = -(-size // limit)
        ends = [size * i // count for i in range(count + 1)]
        buckets += [[(section, *part)] for part in itertools.pairwise(ends)]
        left = limit - size if count == 1 else 0
    return [bucket for bucket in buckets if bucket]


def dense_mean(tree: Any, axes: Axes) -> Any:
    """The mean over all workers at full precision, float32."""
    return lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float32), tree), axes.names)


# The largest magnitude of values that fit: all that is computed from them (sums of squares with
# residuals added, variances, their sums over tensors) stays far below float32's overflow at 2**128.
_LARGEST = 2.0**40


def unfit_tensor(sizes: jax.Array, ids: Any) -> jax.Array:
    """The id of the first tensor whose size is not finite, or far too large; 0 if there is none."""
    if not len(ids):
        return jnp.int32(0)
    unfit = ~(sizes <= _LARGEST)
    return jnp.where(jnp.any(unfit), jnp.asarray(ids)[jnp.argmax(unfit)], 0)


def unfit_of(tree: Any) -> jax.Array:
    """As :func:`unfit_tensor`, of a tree of gradients, by the norms of its tensors."""
    with_paths = jax.tree_util.tree_leaves_with_path(tree)
    ids = [tensor_id(jax.tree_util.keystr(path)) for path, _ in with_paths]
    return unfit_tensor(jnp.sqrt(tensor_sums(squared, tree)), np.array(ids, np.int32))
