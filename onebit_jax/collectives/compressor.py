"""What the exchange asks of a compressor, which encodes values as bytes."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax

from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.collectives.layout import Grouping, Layout

Form = Literal["one-stage", "two-stage"]


class Compressor(Protocol):
    """Encodes values as bytes, on workers and on servers, and decodes them.

    Attributes:
      forms: the forms of the exchange it has; with ``"one-stage"`` alone it is never asked to
        :meth:`serve`.
      planes: the number of values per byte.
      grouping: the layout of tensors.
    """

    @property
    def forms(self) -> tuple[Form, ...]: ...  # noqa: D102

    @property
    def planes(self) -> int: ...  # noqa: D102

    @property
    def grouping(self) -> Grouping: ...  # noqa: D102

    def init(self, layout: Layout) -> Any:
        """The state before the first call; ``()`` for a compressor without state."""
        ...

    def compress(
        self, layout: Layout, values: Sequence[Any], state: Any, call: Any
    ) -> tuple[list[jax.Array], Any]:
        """Encodes a worker's values, a row per server; the new state.

        Rows are returned in sections, uint8 ``[chunks, bytes]``: one for each piece, and of what
        belongs to no piece, such as all scales or keys. A piece's section depends on it alone.
        """
        ...

    def serve(
        self, layout: Layout, rows: jax.Array, state: Any, call: Any
    ) -> tuple[list[jax.Array], Any]:
        """A server's row for all from all workers' rows, in sections ``[bytes]``; the new state."""
        ...

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """Decodes all servers' rows ``[..., chunks, bytes]`` to pieces."""
        ...


class FeedbackCompressor(Compressor, Protocol):
    """A compressor with error feedback, whose state is an :class:`ExchangeState`."""

    def mean_norm(self, layout: Layout, received: jax.Array, state: ExchangeState) -> jax.Array:
        """The norm of the mean that this shard received, of its active elements.

        Args:
          layout: the layout.
          received: servers' rows ``[chunks, bytes]``, or workers' ``[workers, chunks, bytes]``.
          state: holds the active elements.
        """
        ...

    def message(self, layout: Layout, state: ExchangeState) -> list[jax.Array]:
        """The sections that :meth:`compress` returned with this state."""
        ...

    def unsent(self, layout: Layout, state: ExchangeState) -> ExchangeState:
        """The state whose message is 0: the worker's residuals are its compensated values."""
        ...

    def residuals(
        self, layout: Layout, state: ExchangeState
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """This worker's ``e_i``, in pieces, and this server's ``E_j``, for each of its stacks."""
        ...

    def with_residual(
        self, layout: Layout, state: ExchangeState, pieces: Sequence[jax.Array]
    ) -> ExchangeState:
        """A fresh state in which every worker has this residual, in pieces of all shards."""
        ...
