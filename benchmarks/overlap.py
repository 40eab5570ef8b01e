"""Times steps whose exchange travels during the backward pass, on hosts of a chosen bandwidth.

    python -m benchmarks.overlap
    python -m benchmarks.overlap --bandwidths 100mbit --steps 8

The hosts are those of `benchmarks.network`, and as there share the machine's cores: Linux, root and
iproute2. Each trains a chain of layers by 1-bit Adam in its compression phase, through
`onebit_jax.train_step`; the default sizes compute about a second on one core.

- *compute*: Adam without an exchange, each host by itself;
- *wire*: an all-gather of as many bytes as the exchange sends, in buckets of the same size;
- *waiting*: the step with a norm to clip at that is never reached, so that no bucket leaves before
  the last gradient is there;
- *overlapped*: the step with default arguments;
- *mean* and *mean, late*: Adam on gradients averaged at one bit, by `compressed_mean`, and the same
  with `delay=1`, whose means come one step late;
- *float32*: Adam on float32 means, one step at each bandwidth;
- *DDP*: the same chain in PyTorch, with Adam. Its DistributedDataParallel sends buckets during the
  backward pass too, in float32 or in float16; beside it PyTorch's compute alone. It needs

      pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu

Waiting and overlapped make the same steps: the benchmark compares their parameters bit for bit.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import torch_overlap
from benchmarks.counts import check_counts
from benchmarks.kinds import AXIS
from benchmarks.network.hosts import bits_per_second, network, why_unavailable
from benchmarks.network.jax_kinds import mesh_of_hosts
from benchmarks.network.processes import Place, Processes
from onebit_jax.collectives.stages import bucket_limit, in_buckets
from train import record

_RATE = 1e-4
_NEVER_REACHED = 1e9


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    hosts: int = 2
    """Number of hosts: with two an exchange has one stage, with more it has two."""
    bandwidths: tuple[str, ...] = ("10gbit", "1gbit", "400mbit", "200mbit", "100mbit", "50mbit")
    """Of each host, each way: a number of mbit or gbit, or "unshaped"."""
    layers: int = 12
    """Layers of the chain."""
    width: int = 2048
    """Rows and columns of a layer's matrix."""
    rows: int = 256
    """Rows of each host's batch."""
    rounds: int = 2
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn at one bandwidth."""
    limit: float = 120.0
    """Seconds after which a host that does not answer is given up."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/overlap.json")
    """File to write the figures to."""


class Kind(NamedTuple):
    """A way to make a step.

    Attributes:
      make: the optimizer; None for bytes alone.
      max_grad_norm: as for `onebit_jax.train_step`.
      exchanges: whether it sends anything, so that its time depends on the bandwidth.
      steps: how many to make at most.
    """

    make: Callable[[], optax.GradientTransformation] | None
    max_grad_norm: float | None = None
    exchanges: bool = True
    steps: int | None = None


def _onebit_adam() -> optax.GradientTransformation:
    return onebit_jax.onebit_adam(
        _RATE,
        warmup=1,
        warmup_bits=32,
        variance_refreshes=None,
        axis_name=AXIS,
    )


def _adam_on_means(delay: int) -> optax.GradientTransformation:
    return optax.chain(onebit_jax.compressed_mean(AXIS, delay=delay), optax.adam(_RATE))


KINDS = {
    "compute": Kind(lambda: optax.adam(_RATE), exchanges=False),
    "wire": Kind(None),
    "waiting": Kind(_onebit_adam, max_grad_norm=_NEVER_REACHED),
    "overlapped": Kind(_onebit_adam),
    "mean": Kind(functools.partial(_adam_on_means, delay=0)),
    "mean, late": Kind(functools.partial(_adam_on_means, delay=1)),
    "float32": Kind(
        lambda: optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(_RATE)), steps=1
    ),
}


def chain_loss(params: Any, x: jax.Array) -> jax.Array:
    """A forward pass through all layers."""
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x - 0.5))


class Worker:
    """Makes the steps on one host, together with those on the others."""

    def __init__(self, place: Place):
        self._mesh = mesh_of_hosts(place)

    def prepare(self, name: str, layers: int, width: int, rows: int) -> None:
        """Makes parameters, state and batch, and compiles."""
        kind, mesh = KINDS[name], self._mesh

        def make_params() -> Any:
            drawn = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
            return {f"layer {i:03}": drawn[i] for i in range(layers)}

        replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        self._params = jax.jit(make_params, out_shardings=replicated)()
        self._batch = jax.jit(
            lambda: jax.random.normal(jax.random.key(1), (rows * mesh.size, width)),
            out_shardings=split,
        )()
        tx, self._state = kind.make and kind.make(), ()
        if tx is None:
            self._step = _bytes_alone(mesh, layers * width**2)
        elif kind.exchanges:
            self._state = onebit_jax.init(tx, self._params, mesh)
            self._step = onebit_jax.train_step(
                chain_loss, tx, mesh, max_grad_norm=kind.max_grad_norm
            )
        else:
            self._state = jax.jit(tx.init, out_shardings=replicated)(self._params)
            self._step = _alone(tx, mesh)
        # One of warm-up, and those in which the phase is not yet known ahead.
        for _ in range(4):
            self.step()

    def step(self) -> float:
        """Makes one step; seconds."""
        start = time.perf_counter()
        self._params, self._state, metrics = self._step(self._params, self._state, self._batch)
        jax.block_until_ready((self._params, self._state, metrics))
        return time.perf_counter() - start

    def release(self) -> str:
        """Frees everything; a digest of the parameters."""
        digest = hashlib.sha256()
        for x in jax.tree.leaves(self._params):
            digest.update(x.addressable_data(0).tobytes())
        del self._params, self._state, self._batch
        return digest.hexdigest()


def _alone(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Any:
    """A step of each host by itself, without any collective."""

    def worker(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(chain_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    mapped = jax.shard_map(
        worker,
        mesh=mesh,
        in_specs=(P(), P(), P(AXIS)),
        out_specs=(P(), P(), P(AXIS)),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def _bytes_alone(mesh: jax.sharding.Mesh, elements: int) -> Any:
    """Sends as many bytes as an exchange of so many elements, and computes nothing."""
    own = jnp.zeros(2 * elements // 8 // mesh.size, jnp.uint8)

    def worker(sent: jax.Array) -> jax.Array:
        return in_buckets(lambda x: lax.all_gather(x, AXIS), [sent], bucket_limit("auto"))

    mapped = jax.jit(
        jax.shard_map(worker, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
    )
    return lambda params, state, batch: (params, state, mapped(own))


def measure(options: Options, in_torch: bool) -> dict[str, dict[str, Any]]:
    """Seconds and megabytes of each kind at each bandwidth; the kinds take turns.

    Args:
      options: what to time.
      in_torch: whether to time PyTorch too.

    Raises:
      RuntimeError: the overlapped step did not make the parameters of the one that waits.
    """
    torch_kinds = {}
    if in_torch:
        alone, *exchanging = torch_overlap.KINDS
        torch_kinds = {alone: Kind(None, exchanges=False)}
        torch_kinds |= {name: Kind(None, steps=1) for name in exchanging}
    sizes = options.layers, options.width, options.rows
    figures: dict[str, dict[str, Any]] = {name: {} for name in (*KINDS, *torch_kinds)}
    with network(options.hosts) as net, contextlib.ExitStack() as started:

        def processes(module: str, port: int) -> Processes:
            made = Processes(net, module, port, [], options.limit)
            started.callback(made.close)
            return made

        groups = [(KINDS, processes("benchmarks.overlap", 29500))]
        if torch_kinds:
            groups.append((torch_kinds, processes("benchmarks.torch_overlap", 29600)))
        for _ in range(options.rounds):
            digests = {}
            for kinds, hosts in groups:
                for name, kind in kinds.items():
                    net.shape("unshaped")
                    hosts.ask("prepare", name, *sizes)
                    for bandwidth in options.bandwidths if kind.exchanges else ("any",):
                        net.shape("unshaped" if bandwidth == "any" else bandwidth)
                        before = hosts.ask("sent")[0][0]
                        # A step has ended when the last host's has.
                        steps = kind.steps or options.steps
                        seconds = [max(hosts.ask("step")) for _ in range(steps)]
                        sent = hosts.ask("sent")[0][0] - before
                        figure = figures[name].setdefault(bandwidth, {"seconds": []})
                        figure["seconds"] += seconds
                        figure["megabytes"] = sent / steps / 1e6
                    digests[name] = hosts.ask("release")[0]
            if digests["waiting"] != digests["overlapped"]:
                raise RuntimeError("the overlapped step made other parameters than the other")
    return figures


def print_table(figures: dict[str, dict[str, Any]], bandwidths: tuple[str, ...]) -> None:
    """Milliseconds per step, medians."""
    medians = {
        name: {x: 1e3 * statistics.median(figure["seconds"]) for x, figure in by.items()}
        for name, by in figures.items()
    }
    alone = {name: by["any"] for name, by in medians.items() if "any" in by}
    listed = ", ".join(f"{name} {ms:.0f} ms" for name, ms in alone.items())
    print(f"alone: {listed}; milliseconds per step, medians:")
    columns = [name for name in medians if name not in alone]
    print(f"{'':10}" + "".join(f"{name:>14}" for name in columns))
    for bandwidth in bandwidths:
        row = "".join(f"{medians[name][bandwidth]:14.0f}" for name in columns)
        print(f"{bandwidth:10}{row}")


def main(options: Options) -> None:
    """Runs the benchmark."""
    check_counts(options, "hosts", "layers", "width", "rows", "rounds", "steps", "limit")
    for bandwidth in options.bandwidths:
        bits_per_second(bandwidth)
    if reason := why_unavailable():
        raise SystemExit(reason)
    in_torch = importlib.util.find_spec("torch") is not None
    if not in_torch:
        print("left out: DDP, which needs torch")
    figures = measure(options, in_torch)
    print_table(figures, options.bandwidths)
    record.write(options.json, options, {"kinds": figures})
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
