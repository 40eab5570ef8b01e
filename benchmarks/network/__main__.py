"""Times optimizer steps on hosts that are joined by a network of a chosen bandwidth.

    python -m benchmarks.network
    python -m benchmarks.network --hosts 2 --bandwidths 1gbit --kinds "Adam, float32" "1-bit Adam"
    python -m benchmarks.network --redraw --calibration runs/benchmarks/step.json

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
without headers. Beside them stands what `onebit_jax.wire` reads from the compiled program. With a
record of `benchmarks.step` with as many workers, what `onebit_jax.plan` predicts stands beside the
times; what the hosts' sockets cost is taken from the dense step without a limit, and nothing else.
"""

import dataclasses
import importlib.util
import json
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


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts."""
    bandwidths: tuple[str, ...] = ("unshaped", "10gbit", "1gbit", "100mbit")
    """Of each host, each way: a number of mbit or gbit, or "unshaped"."""
    kinds: tuple[str, ...] = tuple(_MODULES)
    """What to time; all of it by default. The others are compared with the first."""
    elements: int | None = None
    """Elements of a single matrix to update in place of BERT-Base; a power of two."""
    shape: tuple[int, int] | None = None
    """Rows and columns of 16 matrices to update in place of BERT-Base."""
    rounds: int = 3
    """How often the kinds take turns."""
    steps: int = 2
    """Steps in a turn at one bandwidth, at most."""
    budget: float = 30.0
    """Seconds after which no further step of a kind is made at one bandwidth; one is, always."""
    limit: float = 300.0
    """Seconds after which a kind is given up whose step has not ended, or its compilation."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/network.json")
    """File to write the figures to."""
    plot: pathlib.Path | None = None
    """File to draw them into; by default beside the JSON, as PNG."""
    redraw: bool = False
    """Only print and draw the figures that --json holds again."""
    calibration: tuple[pathlib.Path, ...] = ()
    """Records of `benchmarks.step`, one for each of --hosts: adds the plan's predictions."""


def check(options: Options) -> None:
    """Refuses options that mean nothing.

    Raises:
      ValueError: for the first of them.
    """
    for kind in options.kinds:
        if kind not in _MODULES:
            raise ValueError(f"kinds={kind!r} must be among {', '.join(map(repr, _MODULES))}.")
    for bandwidth in options.bandwidths:
        bits_per_second(bandwidth)
    for count in options.hosts:
        if not 2 <= count <= 200:
            raise ValueError(f"hosts={count} must be from 2 to 200: write --hosts 2 4.")
    for field in ("hosts", "bandwidths", "kinds"):
        values = getattr(options, field)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{field}={values!r} must hold something, and nothing twice.")
    if options.elements is not None and options.elements < 1:
        raise ValueError(f"elements={options.elements} must be a power of two, such as {2**26}.")
    if options.shape is not None and (options.elements is not None or min(options.shape) < 1):
        raise ValueError(
            f"shape={options.shape!r} must be rows and columns, both at least 1, and given without "
            f"elements: write --shape 6713 1024."
        )
    for field in ("rounds", "steps", "budget", "limit"):
        value = getattr(options, field)
        if not 0 < value < math.inf:
            raise ValueError(f"{field}={value!r} must be above 0: leave it out for the default.")
    if options.calibration and len(options.calibration) != len(options.hosts):
        raise ValueError(
            f"calibration={options.calibration!r} must have one file for each of "
            f"hosts={options.hosts!r}: write --hosts 2 --calibration FILE."
        )
    for path in options.calibration:
        report.read_calibration(path)


def not_installed(kind: str) -> list[str]:
    """The packages that a kind needs and that are not there."""
    needs = torch_kinds.KINDS[kind].needs if kind in torch_kinds.KINDS else ()
    return [package for package in needs if importlib.util.find_spec(package) is None]


class Hosts:
    """The hosts of one network with their processes, which are started when first needed."""

    def __init__(self, network: Network, shapes: list[tuple[int, ...]], limit: float):
        self._network, self._shapes, self._limit = network, shapes, limit
        self._running: dict[str, Processes] = {}
        self._port = 29500

    def prepare(self, kind: str) -> int | None:
        """Gets a kind ready to be timed; the bytes that its program says it sends.

        Raises:
          HostError: a host failed or did not answer; the kind's processes are ended.
        """
        # What is not timed need not be slow.
        self._network.shape(UNSHAPED)
        module = _MODULES[kind]
        if module not in self._running:
            self._port += 1
            self._running[module] = Processes(
                self._network, module, self._port, self._shapes, self._limit
            )
        wire = self._ask(kind, "prepare", kind)[0]
        # Asked for itself, as Gloo does not wait long for a host that still compiles.
        self._ask(kind, "warm_up")
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

        Raises:
          HostError: a host failed or did not answer; the kind's processes are ended.
        """
        self._network.shape(bandwidth)
        before = self._ask(kind, "sent")
        seconds: list[float] = []
        while len(seconds) < most:
            # The step has ended when the last host's has.
            seconds.append(max(self._ask(kind, "step")))
            if sum(seconds) + seconds[-1] > budget:
                break
        counts = [
            [now - then for now, then in zip(*host, strict=True)]
            for host in zip(self._ask(kind, "sent"), before, strict=True)
        ]
        sent, packets = (statistics.mean(count) for count in zip(*counts, strict=True))
        return {"seconds": seconds, "sent": sent, "packets": packets}

    def release(self, kind: str) -> None:
        """Frees what `prepare` made.

        Raises:
          HostError: a host failed or did not answer; the kind's processes are ended.
        """
        self._ask(kind, "release")

    def _ask(self, kind: str, *request: Any) -> list[Any]:
        try:
            return self._running[_MODULES[kind]].ask(*request)
        except HostError:
            self._running.pop(_MODULES[kind]).close()
            raise

    def close(self) -> None:
        """Ends all processes."""
        for processes in self._running.values():
            processes.close()


def measure(
    hosts: Hosts, kinds: list[str], options: Options
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
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
        for kind in kinds:
            if kind in failed:
                continue
            print(f"turn {turn + 1} of {options.rounds}: {kind}", file=sys.stderr)
            where = "preparation"
            try:
                wire = hosts.prepare(kind)
                for bandwidth in bandwidths:
                    where = bandwidth
                    before = figures[bandwidth].get(kind)
                    left = options.budget - (sum(before["seconds"]) if before else 0.0)
                    if before and min(before["seconds"]) > left:
                        continue
                    steps = hosts.steps(kind, bandwidth, options.steps, left)
                    figures[bandwidth][kind] = joined(before, steps) | {"wire_bytes": wire}
                hosts.release(kind)
            except HostError as failure:
                failed[kind] = f"{where}: {failure}"
    return figures, failed


def joined(before: dict[str, Any] | None, steps: dict[str, Any]) -> dict[str, Any]:
    """Figures with further steps added."""
    return {name: before[name] + steps[name] for name in steps} if before else steps


def main(options: Options) -> None:
    """Runs the benchmark."""
    check(options)
    if options.redraw:
        _report(json.loads(options.json.read_text(encoding="utf-8")), options)
        return
    if options.shape is not None:
        tree = [jax.ShapeDtypeStruct(options.shape, jnp.float32)] * tasks.MATRICES
    elif options.elements is None:
        tree = tasks.of_tree("bert-base", elements=0).shapes
    else:
        tree = tasks.matrices(options.elements)
    shapes = [x.shape for x in jax.tree.leaves(tree)]
    elements = tasks.size(tree)
    if reason := why_unavailable():
        raise SystemExit(reason)
    # A run that is ended must take its hosts with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    left_out = {kind: missing for kind in options.kinds if (missing := not_installed(kind))}
    for kind, missing in left_out.items():
        print(f"{kind}: not timed, {' and '.join(missing)} not installed")
    kinds = [kind for kind in options.kinds if kind not in left_out]
    tables: list[dict[str, Any]] = []
    given_up: dict[int, dict[str, str]] = {}
    written = {
        "elements": elements,
        "not_installed": left_out,
        "given_up": given_up,
        "tables": tables,
    }
    for count in options.hosts:
        with network(count) as made:
            hosts = Hosts(made, shapes, options.limit)
            try:
                figures, failed = measure(hosts, kinds, options)
            finally:
                hosts.close()
        for bandwidth, figure in figures.items():
            tables.append({"hosts": count, "bandwidth": bandwidth, "kinds": figure})
        given_up[count] = failed
        # Written as soon as it is there: those with more hosts may take hours.
        record.write(options.json, options, written, "torch", "deepspeed")
    _report({**record.context("torch", "deepspeed"), "figures": written}, options)
    print(f"wrote {options.json}")


def _report(written: dict[str, Any], options: Options) -> None:
    figures = written["figures"]
    calibrations = dict(
        zip(options.hosts, map(report.read_calibration, options.calibration), strict=False)
    )
    report.print_tables(figures, options.kinds[0], calibrations)
    picture = options.plot or options.json.with_suffix(".png")
    what = f"A step of {figures['elements']:,} parameters on hosts of a limited bandwidth"
    plot.draw(figures["tables"], f"{what}\n{record.where_and_when(written)}", picture)
    print(f"drew {picture}")


if __name__ == "__main__":
    main(tyro.cli(Options))
