"""An exchange in stages, whose collectives can be separated from encoding and decoding.

*Stages* are a generator that yields each message, is sent the bytes that all workers received of
it, and returns the result. :func:`carry_out` sends each message as it comes. If several exchanges
take turns, encoding and decoding run in a loop that all but one skip, and a collective in a loop
cannot overlap with computations outside. So :func:`send_in_turns` sends all messages by collectives
outside the loops, and :func:`carry_out` is then given the received bytes.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from onebit_jax.collectives.buckets import in_buckets
from onebit_jax.collectives.packing import join_sections
from onebit_jax.collectives.xla_workarounds import overwrite_if

Result = TypeVar("Result")


class Message(NamedTuple):
    """A message of a stage.

    Attributes:
      collective: takes rows, uint8 ``[..., bytes]``, and may add axes before.
      sections: the parts of the rows; uint8 ``[..., bytes]``.
      limit: bytes of a row in a bucket, at most; None for all in one.
      order: the places of sections that leave first, as :func:`.in_buckets` takes it.
    """

    collective: Callable[[jax.Array], jax.Array]
    sections: Sequence[jax.Array]
    limit: int | None
    order: Sequence[int] = ()

    def travel(self) -> jax.Array:
        """Sends it, and returns what all workers receive; rows of a multiple of 128 bytes."""
        return in_buckets(self.collective, self.sections, self.limit, self.order)

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
