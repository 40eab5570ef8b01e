"""An exchange in stages, whose messages may be cut into buckets.

*Stages* are a generator that yields each message, is sent the bytes that all workers received of
it, and returns the result. :func:`carry_out` sends each message as it comes. If several exchanges
take turns, encoding and decoding run in a loop that all but one skip, and a collective in a loop
cannot overlap with computations outside. So :func:`send_in_turns` sends all messages by collectives
outside the loops, and :func:`carry_out` is then given the received bytes.

Buckets are for transports that a large message would hold up. A bucket depends on its own sections
alone: if a backward pass makes their gradients one after the other, each bucket travels while the
other gradients are computed.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from onebit_jax.collectives.packing import join_sections
from onebit_jax.collectives.xla_workarounds import overwrite_if, separate

Result = TypeVar("Result")

# The largest message that Gloo, JAX's transport between CPU hosts, sends both ways at once.
_CPU_BUCKET_BYTES = 2**18


class Message(NamedTuple):
    """A message of a stage.

    Attributes:
      collective: takes rows, uint8 ``[..., bytes]``, and may add axes before.
      sections: the parts of the rows; uint8 ``[..., bytes]``.
      limit: bytes of a row in a bucket, at most; None for all in one.
      order: the places of sections that leave first, as :func:`.in_buckets` takes it.
      zero: as :func:`.in_buckets` takes it.
    """

    collective: Callable[[jax.Array], jax.Array]
    sections: Sequence[jax.Array]
    limit: int | None
    order: Sequence[int] = ()
    zero: jax.Array | None = None

    def travel(self) -> jax.Array:
        """Sends it, and returns what all workers receive; rows of a multiple of 128 bytes."""
        return in_buckets(self.collective, self.sections, self.limit, self.order, self.zero)

    def rows(self) -> jax.Array:
        """The sections side by side; rows of a multiple of 128 bytes."""
        leading = self.sections[0].shape[:-1]
        return join_sections(self.sections, leading)


Stages = Generator[Message, Any, Result]


def carry_out(stages: Stages[Result], received: Sequence[jax.Array] = ()) -> Result:
    """Runs stages, and returns their result.

    Args:
      stages: the stages, from the first on.
      received: the bytes received of the first messages, which are not sent again.
    """
    given, answer = iter(received), None
    try:
        while True:
            message = stages.send(answer)
            answer = next(given, None)
            answer = message.travel() if answer is None else answer
    except StopIteration as finished:
        return finished.value


def send_in_turns(
    which: jax.Array,
    begin: Callable[..., Stages[Any]],
    reads: Sequence[Any],
    *,
    axis_names: tuple[str, ...],
) -> list[jax.Array]:
    """Sends all messages of exchange ``which``; each takes as many bytes as the largest one's.

    Args:
      which: the exchange whose turn it is; int32 ``[]``, the same on all workers.
      begin: begins the stages of an exchange.
      reads: for each exchange the arguments of ``begin``, a tree of arrays.
      axis_names: the axes that the workers run along.

    Returns:
      What all workers received, for :func:`carry_out`.
    """
    received: list[jax.Array] = []
    while True:
        # One exchange may have fewer messages than another: of empty tensors it has none.
        found = {i: x for i, own in enumerate(reads) if (x := _outline(begin, own, received))}
        if not found:
            return received
        longest = max(found.values(), key=lambda message: message.sections[0].shape[-1])
        buffer = jnp.zeros_like(longest.sections[0])
        for i in found:

            def fill(buffer: jax.Array, own: Any, received: Sequence[jax.Array]) -> jax.Array:
                rows = _next_message(begin(own), received).rows()
                return buffer.at[..., : rows.shape[-1]].set(rows)

            reading = (reads[i], received)
            buffer = overwrite_if(which == i, fill, buffer, *reading, axis_names=axis_names)
        received.append(longest._replace(sections=[buffer]).travel())


def _next_message(stages: Stages[Any], received: Sequence[jax.Array]) -> Message:
    """The first message that is not among the received; ``StopIteration`` if there is none."""
    message = next(stages)
    for rows in received:
        message = stages.send(rows)
    return message


def _outline(
    begin: Callable[..., Stages[Any]], reads: Any, received: Sequence[jax.Array]
) -> Message | None:
    """The shape of the next message, in one section; None if there is none."""
    messages: list[Message] = []

    def rows(reads: Any, received: Sequence[jax.Array]) -> jax.Array | None:
        try:
            messages.append(_next_message(begin(reads), received))
        except StopIteration:
            return None
        return messages[0].rows()

    shape = jax.eval_shape(rows, reads, received)
    return messages[0]._replace(sections=[shape], order=()) if messages else None


def bucket_limit(bucket_bytes: int | Literal["auto"] | None) -> int | None:
    """Bytes of a bucket on this backend; ``"auto"`` gives the fastest as measured."""
    if bucket_bytes != "auto":
        return bucket_bytes
    between_cpus = jax.default_backend() == "cpu" and jax.process_count() > 1
    return _CPU_BUCKET_BYTES if between_cpus else None


class Part(NamedTuple):
    """A part of a section, ``[start, end)``."""

    section: int
    start: int
    end: int


def buckets_of(sizes: Sequence[int], limit: int) -> list[list[Part]]:
    """Cuts sections of these many bytes into buckets of at most ``limit``.

    A larger section is cut into equal parts, each a separate bucket; neighbouring smaller ones
    share a bucket.

    >>> [[tuple(part) for part in bucket] for bucket in buckets_of([3, 2, 10, 1], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(2, 0, 5)], [(2, 5, 10)], [(3, 0, 1)]]
    """
    buckets: list[list[Part]] = [[]]
    filled = 0
    for section, size in enumerate(sizes):
        if filled + size > limit:
            buckets.append([])
            filled = 0
        if size <= limit:
            buckets[-1].append(Part(section, 0, size))
            filled += size
            continue
        count = -(-size // limit)
        ends = [size * i // count for i in range(count + 1)]
        buckets += [[Part(section, *part)] for part in itertools.pairwise(ends)]
        filled = limit
    return [bucket for bucket in buckets if bucket]


def in_buckets(
    collective: Callable[[jax.Array], jax.Array],
    sections: Sequence[jax.Array],
    limit: int | None,
    order: Sequence[int] = (),
    zero: jax.Array | None = None,
) -> jax.Array:
    """Applies a collective to rows, ``[..., row_bytes]``, in buckets.

    Args:
      collective: keeps the last axis, except for padding at its end; may add axes before it.
      sections: the rows' sections, side by side; uint8 ``[..., bytes]``.
      limit: bytes of a row in a bucket, at most; None for all in one.
      order: the places of sections whose buckets are filled first, in this order; then the others.
      zero: a 0 that XLA does not know, uint8 ``[]``, by which each bucket waits for the one before.
        Every collective that CPUs wait for holds a thread; several that are ready at once would
        leave none for computing.

    Returns:
      The rows after the collective, each row's length a multiple of 128.
    """
    leading = sections[0].shape[: sections[0].ndim - 1]
    flat = [x.reshape(*leading, -1) for x in sections]
    if limit is None or sum(x.shape[-1] for x in flat) <= limit:
        return collective(join_sections(flat, leading))
    in_order = bool(order)
    order = [*order, *(i for i in range(len(flat)) if i not in set(order))]
    received: list[list[jax.Array]] = [[] for _ in flat]
    rows: Any = ()
    for bucket in buckets_of([flat[i].shape[-1] for i in order], limit):
        parts = [part._replace(section=order[part.section]) for part in bucket]
        sent = [flat[part.section][..., part.start : part.end] for part in parts]
        together = jnp.concatenate(sent, -1)
        if zero is not None and not isinstance(rows, tuple):
            together |= rows.reshape(-1)[0] & zero
        # One after the other: XLA for GPUs would merge them, or start the last one first.
        rows = collective(separate(together, rows) if in_order else together)
        start = 0
        for part in parts:
            end = start + part.end - part.start
            received[part.section].append(rows[..., start:end])
            start = end
    in_sections = [part for parts in received for part in parts]
    return join_sections(in_sections, in_sections[0].shape[:-1])
