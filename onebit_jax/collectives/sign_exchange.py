r"""Means of signs that workers draw at random, over a tree, flat or by nodes.

Of its numbers :math:`z_i` worker :math:`i` sends :math:`u_i = Q(z_i)`
(:mod:`onebit_jax.collectives.stochastic`), and what comes back is
:math:`Q(\frac1n \sum_i u_i)`, drawn once and the same for all, or, not requantized, the mean
itself. Nothing is kept from call to call. In the hierarchical form
(:mod:`onebit_jax.collectives.hierarchical`) a worker is a node, and a device sends its own shard.

Coordinates *at rest* need one more bit of information: whether to stay so. Theirs are the same bits
with another meaning: a worker sends :math:`z_i = 1` if it has a gradient there and -1 otherwise,
which is drawn without chance, and all workers receive 1 if any has sent it. All others are
*active*. Which ones are is said by bits, for each block uint8 ``[n, *plane]``, the same on all
workers.

Transports:
  ``"bits"``: an ``all_to_all`` of signs, the draw of each chunk's server, and an ``all_gather`` of
  what it drew; not requantized, of its counts, in fields of :mod:`~onebit_jax.collectives.votes`.

  ``"votes"``: a ``psum`` of counts. The second :math:`Q` is then drawn everywhere from one shared
  key. It is the one that the servers would draw: both transports give the same results, bit for
  bit.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import hierarchical, layout, votes
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.buckets import in_buckets
from onebit_jax.collectives.in_place import materialize, overwrite_if
from onebit_jax.collectives.layout import Block, join_sections, split_sections
from onebit_jax.collectives.signs import pack_bits, unpack_bits
from onebit_jax.collectives.stochastic import Ratio, binarize, mean_sign, uniforms

Arrays = Sequence[jax.Array]
Transport = Literal["bits", "votes"]


def check_transport(transport: Any, bucket_bytes: int | Literal["auto"] | None) -> None:
    """Raises ``ValueError`` unless there is such a transport, and buckets only for bits."""
    validation.check_name("transport", transport, "bits", "votes")
    if transport == "votes" and isinstance(bucket_bytes, int):
        raise ValueError(
            f"bucket_bytes={bucket_bytes} must be None for transport='votes': XLA joins sums into "
            f"one. Leave it out, or take transport='bits'."
        )


class SignExchange:
    """An exchange over a tree of arrays, or of their shapes, made where its axes are bound.

    Its options are those of :func:`onebit_jax.birder`.

    Attributes:
      axes: the axes that it runs along.
      blocks: the tensors, in order; between nodes, their shards.

    Raises:
      ValueError: for an axis that is not bound, and for more than 255 workers, or nodes, where
        counts travel.
    """

    def __init__(
        self,
        axis_name: str | tuple[str, str],
        transport: Transport,
        requantize: bool,
        local_dtype: hierarchical.LocalDtype,
        bucket_bytes: int | Literal["auto"] | None,
        tree: Any,
    ):
        self.axes = bound_axes(axis_name)
        self._counted = transport == "votes"
        self._requantize = requantize
        if self._counted or not requantize:
            self._field_bits = votes.field_bits(self.axes.nodes)
        self._local_dtype: hierarchical.LocalDtype = local_dtype
        self._bucket_bytes: int | Literal["auto"] | None = bucket_bytes
        self._shapes = shapes = [tuple(x.shape) for x in jax.tree.leaves(tree)]
        if not self.axes.single_node:
            shapes = hierarchical.shard_shapes(shapes, self.axes)
        self.blocks = [Block(shape, self.axes.nodes) for shape in shapes]
        words = (4 * block.workers * block.chunk_bytes for block in self.blocks)
        self._first_words = list(itertools.accumulate(words, initial=0))[:-1]

    def local_mean(self, tensors: Arrays) -> list[jax.Array]:
        """The node's means of its devices' tensors, or a worker's own; float32 ``[1, *shape]``."""
        if self.axes.single_node:
            means = lax.pmean([x.astype(jnp.float32) for x in tensors], self.axes.names)
        else:
            shapes = [block.shape for block in self.blocks]
            means = hierarchical.reduce_scatter(tensors, shapes, self.axes, self._local_dtype)
        return [x.astype(jnp.float32)[None] for x in means]

    def whole_means(self, own: Arrays) -> list[jax.Array]:
        """Of what :meth:`local_mean` has the form of, the means over nodes, as tensors."""
        node, local = self.axes.node, self.axes.local
        if self.axes.single_node:
            return [x[0] for x in own]
        means = [lax.pmean(x[0], node) for x in own]
        if local is not None:
            means = [lax.all_gather(x, local, tiled=True) if x.size else x for x in means]
        return [layout.unpadded(x, y) for x, y in zip(means, self._shapes, strict=True)]

    def own_parts(self, tensors: Arrays) -> list[jax.Array]:
        """Of tensors what this worker has in that form: all of them, or its own shard."""
        local = self.axes.local
        if local is None or self.axes.single_node:
            return [x[None] for x in tensors]
        parts = []
        for x, block in zip(tensors, self.blocks, strict=True):
            rows, *others = block.shape
            whole = layout.padded(x, (self.axes.per_node * rows, *others))
            first = lax.axis_index(local) * rows
            parts.append(lax.dynamic_slice_in_dim(whole, first, rows)[None])
        return parts

    def find_active(
        self, known: Arrays, tensors: Arrays, key: jax.Array, ask: bool | jax.Array
    ) -> list[jax.Array]:
        """Which elements are active; bits.

        Args:
          known: not 0 where an element is known to be, the same on all workers; ``[1, *shape]``.
          tensors: a device's own gradients.
          key: as for :meth:`all_reduce`.
          ask: whether workers tell each other, by an exchange of its own, where their gradients are
            not 0; the same on all workers.
        """

        def tell(active: list[jax.Array], tensors: Arrays) -> list[jax.Array]:
            # Averaged here, if for a second time: what a loop reads is written even if it never
            # runs.
            g, at_rest = self.local_mean(tensors), list(map(jnp.zeros_like, active))
            received = self.all_reduce([Ratio(x, x) for x in g], at_rest, key)
            return [x | y for x, y in zip(active, self.told(received, at_rest), strict=True)]

        parts = zip(self.blocks, known, strict=True)
        active = [pack_bits(block.chunks(x) != 0, axis=1) for block, x in parts]
        if isinstance(ask, jax.Array):
            active = overwrite_if(ask, tell, active, tensors, axis_names=self.axes.names)
        elif ask:
            active = tell(active, tensors)
        # Or XLA would find these bits again wherever they are read, and what they are found from
        # could not be written over.
        return materialize(active, self.axes.node)

    def flags(self, bits: Arrays) -> list[jax.Array]:
        """Bits as booleans, ``[1, *shape]``."""
        parts = zip(self.blocks, bits, strict=True)
        return [block.tensor(unpack_bits(x, axis=1))[None] for block, x in parts]

    def all_reduce(
        self, values: Sequence[Ratio], active: Arrays, key: jax.Array
    ) -> list[jax.Array]:
        """Averages signs drawn at random; :meth:`mean` and :meth:`told` read what came of it.

        Args:
          values: each worker's own ``z_i``, ``[1, *shape]``. At rest they only say, by a
            denominator that is not 0, that there is a gradient.
          active: bits.
          key: a PRNG key, the same on all workers, another in each call.

        Returns:
          For each block signs, uint8 ``[n, *plane]``, or, not requantized, counts, uint8
          ``[n, field bits, *plane]``; bit for bit the same on all workers.
        """
        node, nodes = self.axes.node, self.axes.nodes
        buckets = (self._bucket_bytes, node)
        if self.axes.local is not None:
            key = jax.random.fold_in(key, lax.axis_index(self.axes.local))
        own_key, server_key = (
            jax.random.bits(jax.random.fold_in(key, which), (2,), jnp.uint32)
            for which in (lax.axis_index(node), nodes)
        )

        def draw(block: Block, first: int, flags: jax.Array, z: Ratio) -> jax.Array:
            m, a = map(block.chunks, z)
            at_rest = jnp.where(a != 0, 1.0, -1.0)
            sent = Ratio(jnp.where(flags, m, at_rest), jnp.where(flags, a, 1.0))
            return binarize(sent, uniforms(own_key, block, first))

        flags = [unpack_bits(x, axis=1) for x in active]
        signs = list(map(draw, self.blocks, self._first_words, flags, values))
        if self._counted:
            chunk, axis = None, 1
            answers = votes.all_reduce(signs, self.blocks, axis_name=node)
            counts = [votes.unpack_fields(x, self._field_bits, axis) for x in answers]
        else:
            chunk, axis = lax.axis_index(node), 0
            packed = materialize([pack_bits(x, axis=1) for x in signs], node)
            to_serve = in_buckets(
                lambda x: lax.all_to_all(x, node, 0, 0, tiled=True),
                join_sections(packed, (nodes,)),
                *buckets,
            )
            served = split_sections(to_serve, [block.plane for block in self.blocks])
            counts, flags = list(map(votes.count, served)), [x[chunk] for x in flags]

        def draw_mean(block: Block, first: int, flags: jax.Array, count: jax.Array) -> jax.Array:
            drawn = binarize(mean_sign(count, nodes), uniforms(server_key, block, first, chunk))
            return pack_bits(jnp.where(flags, drawn, count > 0), axis)

        if self._requantize:
            answers = list(map(draw_mean, self.blocks, self._first_words, flags, counts))
        elif not self._counted:
            answers = [votes.pack_fields(x, self._field_bits, axis) for x in counts]
        answers = materialize(answers, node)
        if self._counted:
            return answers
        row = join_sections(answers, ())
        received = in_buckets(lambda x: lax.all_gather(x, node), row, *buckets)
        return split_sections(received, [x.shape for x in answers])

    def told(self, received: Arrays, active: Arrays) -> list[jax.Array]:
        """Where not ``active``, whether any worker has a gradient; bits, 0 where active.

        Args:
          received: what :meth:`all_reduce` returned.
          active: as it was given.
        """
        if not self._requantize:
            counts = [votes.unpack_fields(x, self._field_bits, axis=1) for x in received]
            received = [pack_bits(x > 0, axis=1) for x in counts]
        return [x & ~y for x, y in zip(received, active, strict=True)]

    def mean(self, received: Arrays, active: Arrays) -> list[jax.Array]:
        """The means, or signs with that expectation, and 0 at rest; float32 tensors.

        Args:
          received: what :meth:`all_reduce` returned.
          active: as it was given.
        """
        if self.axes.local is not None:
            gathered = hierarchical.all_gather_sections([*active, *received], self.axes)
            active, received = gathered[: len(active)], gathered[len(active) :]

        def decode(block: Block, shape: layout.Shape, x: jax.Array, bits: jax.Array) -> jax.Array:
            axis = bits.ndim - len(block.plane)
            if self._requantize:
                mean = jnp.where(unpack_bits(x, axis), 1.0, -1.0)
            else:
                count = votes.unpack_fields(x, self._field_bits, axis)
                mean = jnp.divide(*mean_sign(count, self.axes.nodes))
            return layout.unpadded(jnp.where(unpack_bits(bits, axis), mean, 0.0), shape)

        return list(map(decode, self.blocks, self._shapes, received, active))
