"""An exchange of trees with one row per worker, compiled, whatever its compressor."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from onebit_jax import wire
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.layout import Layout, pack_flags
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.random_signs import Draw, RandomSigns, Ratio
from onebit_jax.collectives.votes import Votes
from tests.runs import Sizes, axis_of
from tests.workers import Binding, on_workers

FEEDBACK: dict[str, Any] = {
    "rms": OneBit(),
    "mean_abs": OneBit("mean_abs"),
    "bfloat16": OneBit(residual_dtype="bfloat16"),
    "fused": OneBit(fused=True),
    **{f"{bits} bits": KBits(bits) for bits in (2, 4, 8)},
}
COMPRESSORS: dict[str, Any] = FEEDBACK | {
    "votes": Votes(),
    "votes, counted": Votes(mean=True),
    "random signs": RandomSigns(),
}
# The last is cut along its first axis where that divides, the others as flat arrays.
TREE: dict[str, Any] = {"a": (9,), "b": [(), (0,), (1,), (9,)], "c": (64, 3)}

leaves = jax.tree.leaves


def without_server(compressor: type) -> Any:
    """The class, but all workers average all rows, which are rounded once."""

    def decode(self: Any, layout: Layout, rows: jax.Array) -> Any:
        of_workers = jnp.moveaxis(rows, -2, 0)[..., None, :]
        return [jnp.mean(x, 0) for x in compressor.decode(self, layout, of_workers)]

    return type(compressor.__name__, (compressor,), {"has_server": False, "decode": decode})


class Exchanging:
    """An exchange over zeros of these shapes, and its state from call to call.

    Every element is active, unless `activate` says otherwise. Random signs are drawn for values in
    [-1, 1]; an inactive element has a gradient where its value is above 0.
    """

    def __init__(
        self, compressor: Any, shapes: Any, sizes: Sizes, binding: Binding = "vmap", **options: Any
    ):
        self.like = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        self.sizes, self.workers = sizes, math.prod(np.atleast_1d(sizes).tolist())
        self.how = Exchange(axis_of(sizes), compressor, **options)
        self.active = self.rows(jax.tree.map(lambda x: np.ones(x.shape, np.float32), self.like))
        self.program = on_workers(self._call, sizes, binding)
        self._others: dict[Any, Any] = {}
        self.received: Any = None

    def _call(self, values: Any, state: Any, active: Any, told: Any) -> Any:
        exchange, (turn, key) = self.how.over(self.like), told
        pieces, layout = exchange.node_mean(values), exchange.layout
        if isinstance(self.how.compressor, Votes):
            state = turn
        elif isinstance(self.how.compressor, RandomSigns):
            shown = exchange.node_mean(active)
            bits = [
                piece.section(pack_flags(piece.cut(x > 0), 2))
                for piece, x in zip(layout.pieces, shown, strict=True)
            ]
            state = Draw(jax.random.wrap_key_data(key), layout.row(bits, None))
            pieces = [
                Ratio(0.5 * z, jnp.where((x > 0) | (z > 0), 0.5, 0.0))
                for z, x in zip(pieces, shown, strict=True)
            ]
        if not exchange.compresses:
            return exchange.mean(values, state)[0], (), state
        received, state, _ = exchange.all_reduce(pieces, state)
        kept = () if isinstance(state, Draw) else state
        return layout.scatter(exchange.decode(received)), received, kept

    def over(self, f: Any, *args: Any) -> Any:
        """What `f` makes of the bound exchange and of arguments with one row per worker."""
        if f not in self._others:
            how, like = self.how, self.like
            self._others[f] = on_workers(lambda _, *x: f(how.over(like), *x), self.sizes)
        return jax.device_get(self._others[f](np.zeros(self.workers), *args))

    @functools.cached_property
    def fresh(self) -> Any:
        """The state before the first call."""
        return self.over(BoundExchange.begin, self.active)

    @functools.cached_property
    def state(self) -> Any:
        return self.fresh

    def activate(self, alike: Any) -> None:
        """From the next call on; `alike` has no rows."""
        self.active = self.rows(jax.tree.map(np.float32, alike))
        if isinstance(self.how.compressor, OneBit):
            self.state = self.over(BoundExchange.activate, self.state, self.active)

    def rows(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: np.broadcast_to(x, (self.workers, *np.shape(x))), tree)

    def draw(self, rng: np.random.Generator) -> Any:
        """Normal numbers, of which a tenth are zeros of either sign; random signs', in [-1, 1]."""

        def one(x: Any) -> Any:
            drawn = rng.standard_normal((self.workers, *x.shape), np.float32)
            drawn *= rng.random(drawn.shape) < 0.9
            signs = isinstance(self.how.compressor, RandomSigns)
            return np.clip(drawn, -1, 1) if signs else drawn

        return jax.tree.map(one, self.like)

    def told(self, turn: int = 0) -> Any:
        """The number of the call, and the key of that."""
        return self.rows((np.int32(turn), np.asarray(jax.random.key_data(jax.random.key(turn)))))

    @functools.cached_property
    def compiled(self) -> Any:
        return self.program.lower(self.active, self.fresh, self.active, self.told()).compile()

    def __call__(self, values: Any, turn: int = 0) -> Any:
        results = self.compiled(values, self.state, self.active, self.told(turn))
        means, self.received, self.state = jax.device_get(results)
        return means

    def residuals(self) -> Any:
        """Two trees with one row per worker: its node's `e`, and all servers' `E`."""
        return self.over(_residuals, self.state)

    def sent(self) -> list[wire.Collective]:
        """The collectives of a call bound by `shard_map`."""
        sizes, names = np.atleast_1d(self.sizes).tolist(), axis_of(self.sizes)
        names = (names,) if isinstance(names, str) else names
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
        return wire.collectives(self.compiled, mesh)


def _residuals(exchange: BoundExchange, state: Any) -> Any:
    layout, compressor = exchange.layout, exchange.compressor
    e, E = compressor.residuals(layout, state)  # pyright: ignore[reportAttributeAccessIssue]
    E = [lax.all_gather(x, exchange.axes.node, axis=1) for x in E]
    own, served = (
        layout.scatter(exchange.of_all_shards(x)) if x else layout.full(0.0) for x in (e, E)
    )
    return own, served


def flat(tree: Any) -> np.ndarray:
    """A tree with one row per worker as `[workers, elements]`."""
    return np.concatenate([np.asarray(x, np.float32).reshape(len(x), -1) for x in leaves(tree)], 1)


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    for x, y in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
