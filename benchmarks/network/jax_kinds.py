"""What is timed in JAX: steps of `benchmarks.kinds`, whose exchange goes between the hosts."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks import kinds, tasks
from benchmarks.kinds import AXIS, adamw, dense, onebit_adam
from benchmarks.loops import Run
from benchmarks.network.processes import Place
from onebit_jax import ExchangeOptions, wire


def _mean_in_float16(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    # XLA for CPUs would send bfloat16 as float32.
    del params
    mean = lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float16), updates), AXIS)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), mean, updates)


_BY_NAME = kinds.kinds()
KINDS = {
    "Adam, float32": _BY_NAME["Adam with pmean"],
    "Adam, float32, train_step": _BY_NAME["Adam with pmean, train_step"],
    "1-bit Adam": _BY_NAME["1-bit Adam"],
    "Adam, float16 on the wire": dense(adamw(), mean=optax.stateless(_mean_in_float16)),
    "1-bit Adam, one buffer": onebit_adam(exchange=ExchangeOptions(bucket_bytes=None)),
    "Adam, float32, bare optimizer": _BY_NAME["Adam with pmean, bare optimizer"],
} | {
    name: _BY_NAME[name]
    for name in (
        "1-bit LAMB",
        "0/1 Adam, sync",
        "Birder",
        "Signum",
        "Distributed Lion",
        "EF sign SGD",
        "compressed_mean, Adam",
        "compressed_mean at 8 bits, Adam",
        "compressed_mean at 4 bits, Adam",
        "1-bit Adam, bare optimizer",
        "1-bit Adam, bare optimizer, phase given",
        "EC1, exchange alone",
    )
}


class Worker:
    """Times the kinds on one host, together with those on the others."""

    def __init__(self, place: Place):
        jax.config.update("jax_num_cpu_devices", 1)
        address, port = place.meeting_point
        jax.distributed.initialize(f"{address}:{port}", place.hosts, place.rank)
        self._mesh = jax.make_mesh((place.hosts,), (AXIS,))
        self._task = tasks.matmuls(
            [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in place.shapes]
        )
        self._runs: dict[str, Run] = {}

    def prepare(self, kind: str) -> int | None:
        """Compiles, makes parameters and state; the bytes that the compiled program sends.

        None of one that holds all phases, as it does not say which it will be in.
        """
        if kind not in self._runs:
            self._runs[kind] = Run(KINDS[kind], self._task, self._mesh)
        self._run = self._runs[kind]
        compiled = self._run.compile()
        self._run.begin()
        sent = wire.collectives(compiled, self._mesh)
        return None if any(collective.where for collective in sent) else wire.bytes_sent(sent)

    def warm_up(self) -> None:
        """Makes a step of each phase."""
        self._run.lead_in()

    def step(self) -> float:
        """Makes one step; seconds."""
        return self._run.turn(1)

    def release(self) -> None:
        """Frees parameters and state."""
        self._run.end()
