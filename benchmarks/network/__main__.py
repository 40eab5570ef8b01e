"""Times optimizer steps on hosts that are joined by a network of a chosen bandwidth.

    python -m benchmarks.network
    python -m benchmarks.network --hosts 2 --bandwidths 1gbit --kinds "Adam, float32" "1-bit Adam"

The hosts are made on one machine, from network namespaces: this needs Linux, root and iproute2
(`apt-get install iproute2`). Each host runs one process, which has one device and updates the
parameters of BERT-Base. All hosts share the machine's cores, so what computing costs grows with
their number, as it would not on real ones; the network's share is real.

The first rows are what a user gets: `onebit_jax.init`, `onebit_jax.train_step` with default
arguments and a cheap loss whose gradients matmuls make (`benchmarks.tasks.matmuls`), beside dense
Adam in a jitted `shard_map`. The rows named "bare optimizer" leave out the loss: their gradients
lie in memory. A kind is timed together with its exchange. PyTorch and DeepSpeed are timed too where
they are installed, with nothing else of theirs:

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    DS_BUILD_OPS=0 pip install --no-deps deepspeed==0.19.6
    pip install einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic tqdm

`benchmarks/network/torch_kinds.py` says what of them is timed. Kinds take turns, medians are
quoted. In its turn a kind is made ready without a limit on the network, then timed at every
bandwidth, and nothing of it is kept until its next, so that there may be many kinds. One that fails
or hangs is reported, and left out from there on.

Bytes are those that the hosts' network interfaces count, a step and a host: all of them, and
without headers. Beside them stands what `onebit_jax.wire` reads from the compiled program.
"""

import contextlib
import dataclasses
import math
import pathlib
import signal
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks import tasks
from benchmarks.network import jax_kinds, plot, report, torch_kinds
from benchmarks.network.hosts import UNSHAPED, Network, bits_per_second, network, why_unavailable
from benchmarks.network.processes import HostError, Processes
from train import record

_MODULES = {
    **dict.fromkeys(jax_kinds.KINDS, jax_kinds.__name__),
    **dict.fromkeys(torch_kinds.KINDS, torch_kinds.__name__),
}
# Seconds after which no further step of a kind is made at one bandwidth; one is, always.
_BUDGET = 30.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts."""
    bandwidths: tuple[str, ...] = ("unshaped", "10gbit", "1gbit", "100mbit")
    """Of each host, each way: a number of mbit or gbit, or "unshaped"."""
    kinds: tuple[str, ...] = tuple(_MODULES)
    """What to time; all of it by default. The others are compared with the first."""
    shape: tuple[int, int] | None = None
    """Rows and columns of 16 matrices to update in place of BERT-Base."""
    rounds: int = 3
    """How often the kinds take turns."""
    steps: int = 2
    """Steps in a turn at one bandwidth, at most."""
    limit: float = 300.0
    """Seconds after which a kind is given up whose step has not ended, or its compilation."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/network.json")
    """File to write the figures to; a picture goes beside it."""


class Hosts:
    """The hosts of one network with their processes, which are started when first needed.

    Its methods raise a HostError where a host fails or does not answer; the kind's processes are
    ended then.
    """

    def __init__(self, network: Network, shapes: list[tuple[int, ...]], limit: float):
        self._network, self._shapes, self._limit = network, shapes, limit
        self._running: dict[str, Processes] = {}
        self._port = 29500

    def prepare(self, kind: str) -> int | None:
        """Gets a kind ready to be timed; the bytes that its program says it sends."""
        # What is not timed need not be slow.
        self._network.shape(UNSHAPED)
        module = _MODULES[kind]
        if module not in self._running:
            self._port += 1
            self._running[module] = Processes(
                self._network, module, self._port, self._shapes, self._limit
            )
        wire = self.ask(kind, "prepare", kind)[0]
        # Asked for itself, as Gloo does not wait long for a host that still compiles.
        self.ask(kind, "warm_up")
        return wire

    def steps(self, kind: str, bandwidth: str, most: int, budget: float) -> dict[str, Any]:
        """Makes steps of the kind that is ready, one at least.

        Args:
          kind: the kind.
          bandwidth: of each host, each way.
          most: the number of steps.
          budget: seconds that a further step must fit into.

        Returns:
          Seconds of each step, and bytes and packets that a host sent in all of them.
        """
        self._network.shape(bandwidth)
        before = self.ask(kind, "sent")
        seconds: list[float] = []
        while len(seconds) < most:
            # The step has ended when the last host's has.
            seconds.append(max(self.ask(kind, "step")))
            if sum(seconds) + seconds[-1] > budget:
                break
        counts = [
            [now - then for now, then in zip(*host, strict=True)]
            for host in zip(self.ask(kind, "sent"), before, strict=True)
        ]
        sent, packets = (statistics.mean(count) for count in zip(*counts, strict=True))
        return {"seconds": seconds, "sent": sent, "packets": packets}

    def ask(self, kind: str, *request: Any) -> list[Any]:
        """Asks the kind's processes; their answers, in order."""
        try:
            return self._running[_MODULES[kind]].ask(*request)
        except HostError:
            self._running.pop(_MODULES[kind]).close()
            raise

    def close(self) -> None:
        """Ends all processes."""
        for processes in self._running.values():
            processes.close()


def measure(hosts: Hosts, options: Options) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """All kinds at all bandwidths; the kinds take turns.

    Returns:
      By bandwidth and kind the figures, and what went wrong with the kinds that failed.
    """
    # The fastest first, lest a kind that cannot end in time at the slowest have no figures at all.
    bandwidths = sorted(
        options.bandwidths, key=lambda name: bits_per_second(name) or math.inf, reverse=True
    )
    figures: dict[str, dict[str, Any]] = {name: {} for name in bandwidths}
    failed: dict[str, str] = {}
    for turn in range(options.rounds):
        for kind in options.kinds:
            if kind in failed:
                continue
            print(f"turn {turn + 1} of {options.rounds}: {kind}", file=sys.stderr)
            where = "preparation"
            try:
                wire = hosts.prepare(kind)
                for bandwidth in bandwidths:
                    where = bandwidth
                    before = figures[bandwidth].get(kind)
                    left = _BUDGET - (sum(before["seconds"]) if before else 0.0)
                    if before and min(before["seconds"]) > left:
                        continue
                    steps = hosts.steps(kind, bandwidth, options.steps, left)
                    figures[bandwidth][kind] = joined(before, steps) | {"wire_bytes": wire}
                hosts.ask(kind, "release")
            except HostError as failure:
                failed[kind] = f"{where}: {failure}"
    return figures, failed


def joined(before: dict[str, Any] | None, steps: dict[str, Any]) -> dict[str, Any]:
    """Figures with further steps added."""
    return {name: before[name] + steps[name] for name in steps} if before else steps


def main(options: Options) -> None:
    """Runs the benchmark.

    Raises:
      ValueError: for a kind or a bandwidth that is none, before anything is timed.
    """
    if unknown := set(options.kinds) - _MODULES.keys():
        raise ValueError(f"kinds={unknown} must be among {', '.join(map(repr, _MODULES))}.")
    for bandwidth in options.bandwidths:
        bits_per_second(bandwidth)
    if reason := why_unavailable():
        raise SystemExit(reason)
    # A run that is ended must take its hosts with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    tree = tasks.of_tree("bert-base", elements=0).shapes
    if options.shape is not None:
        tree = [jax.ShapeDtypeStruct(options.shape, jnp.float32)] * tasks.MATRICES
    shapes = [x.shape for x in jax.tree.leaves(tree)]
    tables: list[dict[str, Any]] = []
    given_up: dict[int, dict[str, str]] = {}
    figures = {"elements": tasks.size(tree), "given_up": given_up, "tables": tables}
    for count in options.hosts:
        with (
            network(count) as made,
            contextlib.closing(Hosts(made, shapes, options.limit)) as hosts,
        ):
            measured, given_up[count] = measure(hosts, options)
        for bandwidth, kinds in measured.items():
            tables.append({"hosts": count, "bandwidth": bandwidth, "kinds": kinds})
        # Written as soon as it is there: those with more hosts may take hours.
        record.write(options.json, options, figures, "torch", "deepspeed")
    report.print_tables(figures, options.kinds[0])
    picture = options.json.with_suffix(".png")
    what = f"A step of {figures['elements']:,} parameters on hosts of a limited bandwidth"
    plot.draw(tables, f"{what}\n{record.where_and_when(record.context())}", picture)
    print(f"wrote {options.json} and {picture}")


if __name__ == "__main__":
    main(tyro.cli(Options))
