r"""A count sketch: tables of a vector that can be summed, and read for its large elements.

A table has :math:`r` rows of :math:`c` columns. In each row element :math:`k` is added, with a
random sign :math:`\sigma_r(k)`, to a random column :math:`h_r(k)`, the same on all workers:

.. math::

    S(x)_{r, h} = \sum_{k : h_r(k) = h} \sigma_r(k) \, x_k, \qquad
    \hat x_k = \operatorname{median}_r \; \sigma_r(k) \, S(x)_{r, h_r(k)}

:math:`S` is linear, so the sum of the workers' tables is the table of the sum of their vectors, by
one ``psum`` however many workers there are. An estimate :math:`\hat x_k` is off by about
:math:`\|x\|_2 / \sqrt c`: elements that are larger than that are found, the others are noise.

References:
  Charikar et al., *Finding Frequent Items in Data Streams*, ICALP 2002.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.random_signs import hash_words


@dataclasses.dataclass(frozen=True)
class CountSketch:
    """The tables of vectors.

    Attributes:
      rows: number of rows.
      columns: number of columns.
      seed: of columns and signs.
    """

    rows: int
    columns: int
    seed: int = 0

    def columns_of(self, places: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """For each row the columns of these places, uint32, and their signs, float32."""
        places = places.astype(jnp.uint32)
        keys = jax.random.bits(jax.random.key(self.seed), (self.rows, 2), jnp.uint32)
        words = [hash_words(places, key) for key in keys]
        columns = [(word & np.uint32(2**31 - 1)) % np.uint32(self.columns) for word in words]
        signs = [jnp.where(word >> 31 == 0, 1.0, -1.0) for word in words]
        return list(zip(columns, signs, strict=True))

    def table(self, x: jax.Array) -> jax.Array:
        """``S(x)`` of a vector ``[d]``; float32 ``[rows, columns]``.

        >>> CountSketch(rows=2, columns=8).table(jnp.zeros(3)).shape
        (2, 8)
        """
        zeros = jnp.zeros((self.columns,), jnp.float32)
        hashed = self.columns_of(lax.iota(jnp.uint32, x.size))
        return jnp.stack([zeros.at[column].add(sign * x) for column, sign in hashed])

    def estimates(self, table: jax.Array, size: int) -> jax.Array:
        """Estimates of all elements of a vector of this size; float32 ``[size]``.

        >>> sketch = CountSketch(rows=3, columns=64)
        >>> x = jnp.zeros(100).at[7].set(5.0)
        >>> sketch.estimates(sketch.table(x), 100)[7]
        Array(5., dtype=float32)
        """
        hashed = self.columns_of(lax.iota(jnp.uint32, size))
        read = [sign * row[column] for row, (column, sign) in zip(table, hashed, strict=True)]
        return _median(read)

    def cleared(self, table: jax.Array, places: jax.Array, applied: jax.Array) -> jax.Array:
        """The table with zeros wherever one of these places is added, of those ``applied``."""
        rows = []
        for row, (column, _) in zip(table, self.columns_of(places), strict=True):
            column = jnp.where(applied, column, self.columns)
            rows.append(row.at[column].set(0.0, mode="drop"))
        return jnp.stack(rows)


def _median(values: list[jax.Array]) -> jax.Array:
    """The median of arrays, element by element."""
    # A sorting network fuses into one loop, where a sort along a short axis is slow.
    values = list(values)
    for turn in range(len(values)):
        for i in range(turn % 2, len(values) - 1, 2):
            low, high = values[i], values[i + 1]
            values[i], values[i + 1] = jnp.minimum(low, high), jnp.maximum(low, high)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
