"""An exchange of trees with one row per worker, compiled, whatever its compressor."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from onebit_jax import wire
from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.error_feedback import Call, total_residual
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.random_signs import Draw, RandomSigns, Ratio
from onebit_jax.collectives.votes import Turn, Votes
from tests.runs import Sizes
from tests.workers import AXIS, PAIR, Binding, assert_workers_agree, on_workers

ONE_BIT: dict[str, Any] = {
    "rms": OneBit(),
    "mean_abs": OneBit("mean_abs"),
    "bfloat16": OneBit(residual_dtype="bfloat16"),
    "fused": OneBit(fused=True),
}
FEEDBACK: dict[str, Any] = ONE_BIT | {f"{bits} bits": KBits(bits) for bits in (2, 4, 8)}
COMPRESSORS: dict[str, Any] = FEEDBACK | {
    "votes": Votes(),
    "votes, counted": Votes(mean=True),
    "random signs": RandomSigns(),
    "random signs, counted": RandomSigns(requantize=False),
    "random signs, summed": RandomSigns("votes"),
    "random signs, summed and counted": RandomSigns("votes", requantize=False),
}

# The small ones are joined; the last is alone, and cut along its first axis where that divides.
TREE: dict[str, Any] = {"a": (9,), "b": [(), (0,), (1,)], "c": (64, 3)}

leaves = jax.tree.leaves


class Exchanging:
    """An exchange over zeros of these shapes, and its state from call to call.

    Every element is active, unless `activate` says otherwise. Random signs are drawn for values in
    [-1, 1]; an inactive element has a gradient where its value is above 0.
    """

    def __init__(
        self,
        compressor: Any,
        shapes: Any,
        sizes: Sizes,
        binding: Binding = "vmap",
        bucket_bytes: Any = None,
        **options: Any,
    ):
        self.like = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        self.sizes, self.workers = sizes, math.prod(np.atleast_1d(sizes).tolist())
        options.setdefault("axis_name", AXIS if isinstance(sizes, int) else PAIR)
        self.how = Exchange(compressor=compressor, bucket_bytes=bucket_bytes, **options)
        self.compressor: Any = compressor
        self.received: Any = None
        self.active = self.rows(jax.tree.map(lambda x: np.ones(x.shape, np.float32), self.like))
        self.mapped = on_workers(self._call, sizes, binding)
        self._programs: dict[Any, Any] = {}

    def _call(self, values: Any, state: Any, active: Any, told: Any) -> Any:
        exchange = self.how.over(self.like)
        pieces, (call, turn, key) = exchange.node_mean(values), told
        if isinstance(self.compressor, Votes):
            call = turn
        elif isinstance(self.compressor, RandomSigns):
            layout, shown = exchange.layout, exchange.pieces(active)
            bits = [p.pack(x > 0, 1) for p, x in zip(layout.pieces, shown, strict=True)]
            call = Draw(jax.random.wrap_key_data(key), layout.row(bits, None))
            pieces = [
                Ratio(0.5 * z, jnp.where((x > 0) | (z > 0), 0.5, 0.0))
                for z, x in zip(pieces, shown, strict=True)
            ]
        received, state = exchange.all_reduce(pieces, state, call)
        return exchange.mean(received, state), received, state

    def over(self, f: Any, *args: Any) -> Any:
        """What `f` makes of the bound exchange and of arguments with one row per worker."""
        if f not in self._programs:
            how, like = dataclasses.replace(self.how, bucket_bytes=None), self.like
            self._programs[f] = on_workers(lambda _, *x: f(how.over(like), *x), self.sizes)
        return jax.device_get(self._programs[f](np.zeros(self.workers), *args))

    @functools.cached_property
    def fresh(self) -> Any:
        """The state before the first call."""
        return self.over(lambda x, y: x.init() and x.activate(x.init(), y), self.active)

    @functools.cached_property
    def state(self) -> Any:
        return self.fresh

    def activate(self, alike: Any) -> None:
        """From the next call on; `alike` has no rows."""
        self.active = self.rows(jax.tree.map(np.float32, alike))
        if self.state:
            self.state = self.over(BoundExchange.activate, self.state, self.active)

    def rows(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: np.broadcast_to(x, (self.workers, *np.shape(x))), tree)

    def draw(self, rng: np.random.Generator) -> Any:
        """Normal numbers, of which a tenth are zeros of either sign; random signs', in [-1, 1]."""

        def one(x: Any) -> Any:
            drawn = rng.standard_normal((self.workers, *x.shape), np.float32)
            drawn *= rng.random(drawn.shape) < 0.9
            return np.clip(drawn, -1, 1) if isinstance(self.compressor, RandomSigns) else drawn

        return jax.tree.map(one, self.like)

    def told(self, when: Any = True, decays: Any = (1.0, 1.0), turn: int = 0, seed: int = 0) -> Any:
        of_workers, of_servers = map(np.float32, decays)
        call = Call(np.bool(when), of_workers, of_servers)
        key = np.asarray(jax.random.key_data(jax.random.key(seed)))
        return self.rows((call, Turn(jnp.int32(turn)), key))

    @functools.cached_property
    def lowered(self) -> Any:
        return self.mapped.lower(self.active, self.fresh, self.active, self.told())

    @functools.cached_property
    def compiled(self) -> Any:
        return self.lowered.compile()

    def __call__(self, values: Any, **told: Any) -> Any:
        results = self.compiled(values, self.state, self.active, self.told(**told))
        means, self.received, self.state = jax.device_get(results)
        return means

    def residuals(self) -> Any:
        """Two trees with one row per worker: its node's `e`, and all servers' `E`."""
        return self.over(_residuals, self.state)

    def sent(self, program: Any = None) -> list[wire.Collective]:
        """The collectives of a call bound by `shard_map`."""
        sizes, names = np.atleast_1d(self.sizes).tolist(), self.how.axis_name
        names = (names,) if isinstance(names, str) else names
        mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
        return wire.collectives(program or self.compiled, mesh)


def _residuals(exchange: BoundExchange, state: Any) -> Any:
    layout = exchange.layout
    e, E = exchange.feedback.residuals(layout, state)
    own = layout.scatter([hierarchical.all_gather(x, layout.axes) for x in e])
    return own, total_residual(layout, [jnp.zeros_like(x) for x in e], E)


def averaged(compressor: Any, values: Any, sizes: Sizes) -> Any:
    """What the first call makes of a tree with one row per worker."""
    how = Exchange(AXIS if isinstance(sizes, int) else PAIR, compressor)

    def mean(tree: Any) -> Any:
        exchange = how.over(tree)
        return exchange.average(tree, exchange.init())[0]

    means = jax.device_get(on_workers(mean, sizes)(values))
    assert_workers_agree(means)
    return means


def flat(tree: Any) -> np.ndarray:
    """A tree with one row per worker as `[workers, elements]`."""
    return np.concatenate([np.asarray(x, np.float32).reshape(len(x), -1) for x in leaves(tree)], 1)


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    for x, y in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)
