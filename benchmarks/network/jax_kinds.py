"""What is timed in JAX: update and apply of an optimizer, with its exchange between the hosts."""

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks.network.processes import Place
from benchmarks.step import Kind
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import Live, block_layout, row_bytes, true_elements
from onebit_jax.per_worker import PerWorker
from onebit_jax.training import Phase

AXIS = "hosts"


def _mean_in_float16(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    # XLA for CPUs would send bfloat16 as float32.
    del params
    mean = lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float16), updates), AXIS)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), mean, updates)


class _ExchangeState(NamedTuple):
    """What EC1 keeps; the first three are each worker's own."""

    compensated: PerWorker
    scales: PerWorker
    served: PerWorker
    received: jax.Array
    live: list[Live]


def _exchange_alone() -> optax.GradientTransformation:
    """EC1 of the gradients without an optimizer, as DeepSpeed's exchange is timed."""

    def init(params: optax.Params) -> _ExchangeState:
        shapes = [x.shape for x in jax.tree.leaves(params)]
        blocks = block_layout(shapes, lax.axis_size(AXIS))
        return _ExchangeState(
            PerWorker([jnp.zeros((1, *shape)) for shape in shapes]),
            PerWorker(jnp.zeros((1, len(shapes)))),
            PerWorker([jnp.zeros((1, 8, *block.plane)) for block in blocks]),
            jnp.zeros((lax.axis_size(AXIS), row_bytes(blocks)), jnp.uint8),
            [true_elements(block) for block in blocks],
        )

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, _ExchangeState]:
        del params
        grads, tree = jax.tree.flatten(updates)
        blocks = block_layout([g.shape for g in grads], lax.axis_size(AXIS))
        feedback = ec1.all_reduce(
            grads,
            ec1.Feedback(
                state.compensated.value,
                state.scales.value[0],
                state.served.value,
                state.received,
            ),
            state.live,
            blocks,
            axis_name=AXIS,
        )
        means = ec1.decode(feedback.received, blocks)
        new_state = _ExchangeState(
            PerWorker(feedback.compensated),
            PerWorker(feedback.scales[None]),
            PerWorker(feedback.served),
            feedback.received,
            state.live,
        )
        return tree.unflatten(
            [block.tensor(mean) for block, mean in zip(blocks, means, strict=True)]
        ), new_state

    return optax.GradientTransformation(init, update)


_COMPRESSING: tuple[Phase, ...] = ("warmup", "compression")
KINDS = {
    "Adam, float32": Kind(lambda: optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(1e-4))),
    "Adam, float16 on the wire": Kind(
        lambda: optax.chain(optax.stateless(_mean_in_float16), optax.adam(1e-4))
    ),
    "1-bit Adam": Kind(
        lambda: onebit_jax.onebit_adam(1e-4, warmup=1, axis_name=AXIS), _COMPRESSING
    ),
    "1-bit Adam, buckets of 256 KiB": Kind(
        lambda: onebit_jax.onebit_adam(1e-4, warmup=1, axis_name=AXIS, bucket_bytes=2**18),
        _COMPRESSING,
    ),
    "1-bit LAMB": Kind(
        lambda: onebit_jax.onebit_lamb(1e-4, warmup=1, axis_name=AXIS), _COMPRESSING
    ),
    "0/1 Adam, sync": Kind(
        lambda: onebit_jax.zero_one_adam(1e-4, variance_freeze=1, axis_name=AXIS),
        ("variance", "sync"),
    ),
    "Birder": Kind(lambda: onebit_jax.birder(1e-4, seed=0, axis_name=AXIS), _COMPRESSING),
    "Signum": Kind(lambda: onebit_jax.signum(1e-4, axis_name=AXIS)),
    "Distributed Lion": Kind(lambda: onebit_jax.distributed_lion(1e-4, axis_name=AXIS)),
    "EF sign SGD": Kind(lambda: onebit_jax.ef_signsgd(1e-4, axis_name=AXIS)),
    "EC1, exchange alone": Kind(_exchange_alone),
}


class Worker:
    """Times the kinds on one host, together with those on the others."""

    def __init__(self, place: Place):
        jax.config.update("jax_num_cpu_devices", 1)
        address, port = place.meeting_point
        jax.distributed.initialize(f"{address}:{port}", place.hosts, place.rank)
        self._mesh = jax.make_mesh((place.hosts,), (AXIS,), axis_types=(AxisType.Auto,))
        self._shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in place.shapes]
        own = NamedSharding(self._mesh, P(AXIS))
        rng = np.random.default_rng(place.rank)
        self._grads = [
            jax.make_array_from_process_local_data(own, gradient[None])
            for gradient in random_gradients(place.shapes, rng)
        ]
        self._programs: dict[str, tuple[jax.stages.Compiled, list[jax.stages.Compiled]]] = {}
        self._make_params = jax.jit(
            lambda: [jnp.full(x.shape, 0.5) for x in self._shapes],
            out_shardings=NamedSharding(self._mesh, P()),
        )
        self.release()

    def prepare(self, kind: str) -> int:
        """Compiles, makes parameters and state; the bytes that the compiled program sends."""
        tx = KINDS[kind].make()
        self._params = self._make_params()
        if kind not in self._programs:
            init = jax.jit(lambda params: onebit_jax.init(tx, params, self._mesh))
            init = init.lower(self._params).compile()
            self._state = init(self._params)
            self._programs[kind] = init, [self._compile(tx, x) for x in KINDS[kind].phases]
        init, self._steps = self._programs[kind]
        self._state = init(self._params)
        return onebit_jax.wire.bytes_sent(onebit_jax.wire.collectives(self._steps[-1], self._mesh))

    def warm_up(self) -> None:
        """Makes a step of each phase."""
        self.step()
        while len(self._steps) > 1:
            self._steps = self._steps[1:]
            self.step()

    def step(self) -> float:
        """Makes one update; seconds."""
        start = time.perf_counter()
        self._params, self._state = self._steps[0](self._params, self._state, self._grads)
        jax.block_until_ready((self._params, self._state))
        return time.perf_counter() - start

    def release(self) -> None:
        """Frees parameters and state."""
        self._params: Any = None
        self._state: Any = None

    def _compile(
        self, tx: optax.GradientTransformation, phase: Phase | None
    ) -> jax.stages.Compiled:
        update = optax.with_extra_args_support(tx).update

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = update([g[0] for g in grads], state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        specs = onebit_jax.state_specs(self._state, AXIS)
        mapped = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(P(), specs, P(AXIS)),
            out_specs=(P(), specs),
            check_vma=False,
        )
        jitted = jax.jit(mapped, donate_argnums=(0, 1))
        return jitted.lower(self._params, self._state, self._grads).compile()


def random_gradients(
    shapes: list[tuple[int, ...]], rng: np.random.Generator
) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """One host's own gradients."""
    scale = np.float32(1e-3)
    return [
        scale * rng.standard_normal(math.prod(shape), np.float32).reshape(shape) for shape in shapes
    ]
