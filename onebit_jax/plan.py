"""Predicts whether compression pays on a network, before any code is changed.

``python -m onebit_jax plan --help`` is the same as a command. The predictions are a model's, whose
formulas docs/plan.md lists; nothing is measured, and no accelerator is needed.

>>> setting = Setting(
...     parameters=340e6, workers=64, per_node=4, bandwidth=10e9, step_time=0.45, steps=150_000
... )
>>> print(plan(setting).verdict)
1-bit Adam, hierarchical, is 2.5x as fast as dense bfloat16 here: use it.
"""

import argparse
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onebit_jax

# Bytes per second that a device reads and writes.
MEMORY_BANDWIDTH = 1e12
_LATENCY = 50e-6
_ASSUMED_STEPS = 100_000
# The first update at which the default warm-up can end.
_EARLIEST_END = 160
# Of the utilization table, bit/s.
_BANDWIDTHS = (50e6, 100e6, 200e6, 500e6, 1e9, 2e9, 5e9, 10e9)
_ABOUT = (
    "This compares time and bytes, not losses. The verdict is about 1-bit Adam: other optimizers "
    "reach other losses, and local steps another one for each --every."
)
_SITES = "Latency is 50 us here; links between sites have 10 to 100 ms: pass --latency."


class Setting(NamedTuple):
    """A training run and its machines; the fields are the command's options.

    Attributes:
      parameters: number of model parameters, such as 340e6.
      workers: data-parallel replicas; each is one device, or several with --shards.
      bandwidth: bit/s of one node's network in each direction, as collectives reach it.
      step_time: seconds of one training step on one device, without communication.
      steps: training steps; without it 100,000 are assumed.
      per_node: devices that share one node's network; 1 by default.
      shards: devices that each worker's model is split over, such as FSDP in a node; 1 by default.
      warmup: fraction of the steps before compression begins, after 160 or later; 0.15 by default.
      every: steps between two syncs of local steps (DiLoCo's H); 16 by default, as measured.
      overlap: fraction of a step's compute during which gradients travel; 0 by default, often 0.67.
      latency: seconds of one message between nodes; 50us by default, between sites 10 to 100 ms.
      local_bandwidth: bit/s between a node's devices; 25GB by default (PCIe 4.0), NVLink: 300GB.
      host_bandwidth: bit/s of a host's network software (Gloo, TCP); no limit by default (RDMA).
    """

    parameters: float
    workers: int
    bandwidth: float
    step_time: float
    steps: int | None = None
    per_node: int = 1
    shards: int = 1
    warmup: float = 0.15
    every: int = 16
    overlap: float = 0.0
    latency: float = _LATENCY
    local_bandwidth: float = 200e9
    host_bandwidth: float = math.inf


class Optimizer(NamedTuple):
    """A row of the table.

    Attributes:
      name: as printed.
      bits: per parameter each way, after the warm-up.
      encoding: bytes per parameter that encoding and decoding read and write, beyond Adam's update.
      state: bytes per parameter on a device, a function of the nodes and of the workers in each.
      form: "dense", "flat" or "hierarchical": the collectives that it uses.
      warmup_bits: per parameter each way in the warm-up and in refreshes of the variance; None for
        an optimizer without them.
      every: steps between two exchanges.
      zero_one: whether it refreshes, compresses and syncs in 0/1 Adam's default steps.
      hidden: the fraction of a step's compute that hides the exchange; None for the setting's
        ``overlap``.
    """

    name: str
    bits: int
    encoding: float
    state: Callable[[int, int], float]
    form: str = "hierarchical"
    warmup_bits: int | None = None
    every: int = 1
    zero_one: bool = False
    hidden: float | None = None


class Prediction(NamedTuple):
    """A run with one optimizer. Bytes cross one node's network, one way.

    Attributes:
      exchange: seconds of one exchange, after the warm-up.
      step: seconds of a step after the warm-up, on average.
      run: seconds of the whole run.
      step_bytes: bytes of a step after the warm-up, on average.
      run_bytes: bytes of the whole run.
      state_bytes: bytes of the optimizer's state on one device.
    """

    exchange: float
    step: float
    run: float
    step_bytes: float
    run_bytes: float
    state_bytes: float


def _encoding(bits: int) -> float:
    """Bytes per parameter that an exchange at a few bits reads and writes; 0 for a dense one."""
    return 32 + 4 * bits / 8 if bits < 16 else 0.0


def _feedback(rest: float) -> Callable[[int, int], float]:
    """A worker's residuals, split over its node; a server's between nodes; the rest."""
    return lambda N, L: rest + 4 / L + (4 / (N * L) if N > 1 else 0)


def _onebit_adam_state(nodes: int, local: int) -> float:
    return 8.25 + 4 / (nodes * local) if nodes > 1 else 8


def local_steps(every: int, bits: int) -> Optimizer:
    """Local steps that sync every so many steps, at 32, 8, 4 or 2 bits; at 32 this is DiLoCo.

    >>> local_steps(16, 4).name
    'local steps, 4 bits, every 16'
    """
    # The outer update, with momentum, moves 28 bytes. Before it, workers have nothing to send.
    made = Optimizer(f"local steps, {bits} bits, every {every}", bits, 28, _feedback(20))
    made = made._replace(encoding=_encoding(bits) + 28, every=every, hidden=0.0)
    if bits == 32:
        return made._replace(name=f"DiLoCo, every {every}", form="dense", state=lambda N, L: 20)
    return made


FLOAT32 = Optimizer("dense float32", 32, 0, lambda N, L: 8, "dense")
BFLOAT16 = FLOAT32._replace(name="dense bfloat16", bits=16)
FLAT = Optimizer("1-bit Adam, flat", 1, 13, _onebit_adam_state, "flat", warmup_bits=4)
HIERARCHICAL = FLAT._replace(name="1-bit Adam, hierarchical", form="hierarchical")
# How `encoding` is counted for 1-bit Adam: the worker reads g and c, writes c, and reads it for the
# scale and for the signs (20); the server does the same for its chunk (16 / n, at most 8); decoding
# reads the reciprocal root and the parameter and writes the parameter (12); bits take less than 1;
# Adam alone has 28. A sync of 0/1 Adam reads and writes B and y, and does not decode m (14 more).
# Birder reads both averages once more to draw signs.
OPTIMIZERS = (
    FLAT,
    HIERARCHICAL,
    HIERARCHICAL._replace(name="1-bit LAMB"),
    Optimizer("0/1 Adam", 1, 27, _feedback(16.125), warmup_bits=32, zero_one=True, hidden=0.0),
    Optimizer("Birder", 1, 8, lambda N, L: 8 / L),
    Optimizer("Signum", 1, 0, lambda N, L: 4 / L),
    Optimizer("Distributed Lion", 1, 0, lambda N, L: 4 / L),
    Optimizer("EF sign SGD", 1, 13, _feedback(4.125)),
    Optimizer("Muon, 4 bits", 4, _encoding(4), _feedback(4)),
    Optimizer("Adam on a mean at 8 bits", 8, _encoding(8), _feedback(8)),
    Optimizer("Adam on a mean at 4 bits", 4, _encoding(4), _feedback(8)),
)


def _nodes(setting: Setting) -> tuple[int, int]:
    """The nodes, and the workers in each; the devices of a worker that spans nodes are one."""
    local = max(1, setting.per_node // setting.shards)
    return setting.workers // local, local


def _exchange(form: str, bits: int, setting: Setting) -> tuple[float, float]:
    """Seconds of one exchange, and its bytes through one node's network, one way."""
    n, (N, L) = setting.workers, _nodes(setting)
    # A block of 256 values at 2 to 8 bits has a float32 scale.
    size = setting.parameters * (bits / 8 + (4 / 256 if 1 < bits < 16 else 0))
    full, ring = 4 * setting.parameters, (n - 1) / n * size
    between = 2 * (N - 1) / N * size
    # Of each collective: bytes through a node's network, bytes a device sends inside the node,
    # messages.
    collectives = [(between, 2 * (L - 1) / L * size, 2 * (N - 1))]
    if form == "hierarchical" and N == 1:
        collectives = [(0, 2 * (L - 1) / L * full, 0)]
    elif form == "hierarchical":
        inside = [(0, (L - 1) / L * full, 0), (0, (L - 1) / L * size, 0)]
        collectives = [*inside, (between, 0, 2 * (N - 1))]
    elif form == "flat":
        # In an all-to-all, each device of a node sends. A ring passes the node once.
        collectives = [(L * (n - L) / n * size, (L - 1) / n * size, n - L)]
        collectives += [(ring if N > 1 else 0, ring if L > 1 else 0, N - 1)]
    seconds = sent = 0.0
    for across, inside, messages in collectives:
        across *= min(1, setting.per_node / setting.shards)
        inside /= setting.shards
        seconds += max(8 * across / setting.bandwidth, 8 * inside / setting.local_bandwidth)
        seconds += 8 * across / setting.host_bandwidth + messages * setting.latency
        sent += across
    return seconds, sent


def _counts(optimizer: Optimizer, setting: Setting) -> tuple[float, float, float]:
    """A run's exchanges at the warm-up's bits, its other ones, and these per step after it."""
    steps = setting.steps or _ASSUMED_STEPS
    warmup = setting.warmup * steps
    if optimizer.zero_one:
        # Gaps double after 16 refreshes; after the warm-up, four times, after 32,768 steps.
        warmup = max(1.0, warmup)
        doublings, later = math.floor(math.log2(1 + warmup / 16)), steps - warmup
        refreshes = 16 * (doublings - 1) + (16 + warmup) / 2**doublings
        syncs = sum(min(max(later - 32768 * k, 0), 32768) / 2**k for k in range(4))
        syncs += max(later - 4 * 32768, 0) / 16
        return refreshes, warmup - refreshes + syncs, syncs / later if later else 1.0
    if optimizer.warmup_bits:
        # 16 refreshes each time that the number of steps doubles.
        warmup = min(max(warmup, _EARLIEST_END), steps)
        refreshes = min(16 * math.log2(steps / warmup), steps - warmup)
        return warmup + refreshes, steps - warmup, 1.0
    return 0, steps / optimizer.every, 1 / optimizer.every


def predict(optimizer: Optimizer, setting: Setting) -> Prediction:
    """Predicts a run with one optimizer.

    >>> setting = Setting(parameters=1e9, workers=8, bandwidth=1e9, step_time=1.0)
    >>> round(predict(FLOAT32, setting).step, 1), round(predict(FLAT, setting).step, 1)
    (57.0, 2.8)
    """
    encoded = setting.parameters / setting.shards / MEMORY_BANDWIDTH
    exchange, sent = _exchange(optimizer.form, optimizer.bits, setting)
    hidden = setting.overlap if optimizer.hidden is None else optimizer.hidden
    added = max(0.0, exchange - hidden * setting.step_time) + encoded * optimizer.encoding
    # XLA for GPUs hides no exchange of a warm-up or refresh.
    bits = optimizer.warmup_bits or 32
    warming, warming_sent = _exchange("dense" if bits >= 16 else optimizer.form, bits, setting)
    warmups, others, share = _counts(optimizer, setting)
    run = (setting.steps or _ASSUMED_STEPS) * setting.step_time
    N, L = (setting.workers, 1) if optimizer.form == "flat" else _nodes(setting)
    return Prediction(
        exchange,
        step=setting.step_time + share * added,
        run=run + warmups * (warming + encoded * _encoding(bits)) + others * added,
        step_bytes=share * sent,
        run_bytes=warmups * warming_sent + others * sent,
        # On one node nothing is compressed, so nothing is split over it.
        state_bytes=setting.parameters / setting.shards * optimizer.state(N, L if N > 1 else 1),
    )


class Plan(NamedTuple):
    """A verdict and its table; ``print(plan)`` is what the command prints.

    Attributes:
      setting: the run and its machines.
      verdict: whether to use 1-bit Adam, in its faster form.
      notes: what the verdict leaves out.
      predictions: by the optimizer's name.
      speedup: time of a run with dense bfloat16, divided by the optimizer's, by its name.
      pays_below: bit/s below which a run is faster than with dense bfloat16, by the optimizer's
        name; ``inf`` if it always is, 0 if it never is.
    """

    setting: Setting
    verdict: str
    notes: tuple[str, ...]
    predictions: dict[str, Prediction]
    speedup: dict[str, float]
    pays_below: dict[str, float]

    def __str__(self) -> str:
        """The verdict, a row per optimizer, and the notes."""
        s, total = self.setting, ["total"] if self.setting.steps else []
        rows = [["", "step", *total, "speedup", "pays below", "state", "per node and step"]]
        for name, p in self.predictions.items():
            below = self.pays_below.get(name, math.nan)
            words = {0: "never", math.inf: "always"}
            pays = "" if math.isnan(below) else words.get(below) or _rate(below)
            times = [_time(p.step), *([_time(p.run)] if total else [])]
            sizes = [f"{p.state_bytes / 1e9:,.2f} GB", _scaled(p.step_bytes, "B")]
            rows.append([name, *times, f"{self.speedup[name]:.1f}x", pays, *sizes])
        run = (
            f"{s.parameters:,.0f} parameters, {s.workers} workers"
            f"{f' of {s.shards} devices' if s.shards > 1 else ''}, {s.per_node}-device nodes, "
            f"{_rate(s.bandwidth)} each, {_time(s.step_time)} of compute per step, "
            f"{s.steps or _ASSUMED_STEPS:,} steps{'' if total else ' assumed'}"
        )
        return "\n".join([self.verdict, "", run, "", *_aligned(rows), "", *self.notes])


def plan(setting: Setting) -> Plan:
    """Predicts a run with each optimizer and says whether 1-bit Adam pays.

    Raises:
      ValueError: for a field outside its range.

    >>> found = plan(Setting(parameters=110e6, workers=2, bandwidth=10e9, step_time=0.2))
    >>> print(f"{found.speedup['1-bit Adam, flat']:.1f}x")
    1.7x
    """
    _check(setting)
    compared = (*OPTIMIZERS, local_steps(setting.every, 32), local_steps(setting.every, 4))
    predictions = {x.name: predict(x, setting) for x in (FLOAT32, BFLOAT16, *compared)}
    dense = predictions[BFLOAT16.name]
    speedup = {name: dense.run / x.run for name, x in predictions.items()}
    pays_below = {x.name: _pays_below(x, setting) for x in compared}
    best = max(FLAT.name, HIERARCHICAL.name, key=speedup.__getitem__)
    verdict = _verdict(best, speedup[best], dense.step / setting.step_time, pays_below[best])
    if (setting.steps or _ASSUMED_STEPS) <= _EARLIEST_END:
        verdict = f"Do not use it: one bit per parameter begins after update {_EARLIEST_END}."
    far = setting.latency == _LATENCY and setting.bandwidth < 1e9
    notes = (_ABOUT, _SITES) if far else (_ABOUT,)
    return Plan(setting, verdict, notes, predictions, speedup, pays_below)


def _pays_below(optimizer: Optimizer, setting: Setting) -> float:
    def faster(exponent: float) -> bool:
        at = setting._replace(bandwidth=10**exponent)
        return predict(optimizer, at).run < predict(BFLOAT16, at).run

    # A scan from 1 bit/s to 1 Ebit/s, then a bisection: if the local links limit the dense exchange
    # first, one bit may lose at some bandwidths and win again above them.
    high = next((i / 20 for i in range(361) if not faster(i / 20)), math.inf)
    if high in (0, math.inf):
        return high
    low = high - 1 / 20
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if faster(middle) else (low, middle)
    return 10**low


def _verdict(name: str, gain: float, most: float, below: float) -> str:
    # A smaller gain is within the model's error.
    if gain >= 1.1:
        return f"{name}, is {gain:.1f}x as fast as {BFLOAT16.name} here: use it."
    verdict = (
        f"{'Hardly worth it' if gain > 1.02 else 'Do not use it'}: {name}, would take "
        f"{100 * abs(1 - 1 / gain):.1f} % {'less' if gain > 1 else 'more'} time than "
        f"{BFLOAT16.name}. The exchange is {100 * (1 - 1 / most):.0f} % of a {BFLOAT16.name} step: "
        f"no compression could be more than {most:.2f}x as fast."
    )
    pays = gain <= 1 and 0 < below < math.inf
    return f"{verdict} It would be faster below {_rate(below)}." if pays else verdict


def utilization(setting: Setting) -> str:
    """A table of compute's share of a step's time, over bandwidths and sync intervals.

    Args:
      setting: the run and its machines; its ``bandwidth`` and ``every`` are not used.

    Raises:
      ValueError: for a field outside its range.
    """
    _check(setting)
    compared = {x.name: [x] for x in (FLOAT32, BFLOAT16)} | {"1-bit Adam": [FLAT, HIERARCHICAL]}
    syncs = (local_steps(every, bits) for bits in (32, 4) for every in (1, 16, 32, 128))
    rows = [["compute utilization", *map(_rate, _BANDWIDTHS)]]
    for name, forms in (compared | {x.name: [x] for x in syncs}).items():
        settings = [setting._replace(bandwidth=x) for x in _BANDWIDTHS]
        steps = [min(predict(x, at).step for x in forms) for at in settings]
        rows.append([name, *(f"{setting.step_time / step:.0%}" for step in steps)])
    return "\n".join([*_aligned(rows), *(["", _SITES] if setting.latency == _LATENCY else [])])


def _check(setting: Setting) -> None:
    counts = "parameters workers steps per_node shards every"
    for fields, fits, expected in (
        (counts, lambda x: x >= 1 and x % 1 == 0, "a whole number, 1 or more"),
        ("bandwidth step_time", lambda x: 0 < x < math.inf, "above 0 and finite"),
        ("local_bandwidth host_bandwidth", lambda x: x > 0, "above 0"),
        ("latency", lambda x: 0 <= x < math.inf, "at least 0 and finite"),
        ("warmup overlap", lambda x: 0 <= x <= 1, "a fraction, from 0 to 1"),
    ):
        for field in fields.split():
            value = getattr(setting, field)
            if value is not None and not fits(value):
                raise ValueError(f"{field}={value!r} must be {expected}.")
    workers, shards, per_node = setting.workers, setting.shards, setting.per_node
    if (shards % per_node and per_node % shards) or workers % _nodes(setting)[1]:
        whole = "each node must hold the same number of whole workers, or each worker whole nodes"
        raise ValueError(f"{workers=}, {shards=}, {per_node=}: {whole}.")


def _scaled(value: float, unit: str) -> str:
    power = min(int(math.log10(max(value, 1)) // 3), 5)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


_rate = functools.partial(_scaled, unit="bit/s")


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return ["  ".join(row) for row in aligned]


def _quantity(units: Mapping[str, float], examples: str, text: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?) ?(\S*)", text, re.ASCII)
    if not found or found[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} must have a unit, as in {examples}")
    return float(found[1]) * units[found[2]]


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value % 1 == 0 else value


_BITS = {"bit": 1, "B": 8, "bit/s": 1, "B/s": 8}
_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATES = {prefix + unit: x * y for prefix, x in _PREFIXES.items() for unit, y in _BITS.items()}
_TIMES = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6}
_PARSERS = {
    "N": _number,
    "F": float,
    "RATE": functools.partial(_quantity, _RATES, "10Gbit, 100Mbit or, in bytes, 25GB"),
    "TIME": functools.partial(_quantity, _TIMES, "50us, 450ms or 0.45s"),
}
_METAVARS = dict.fromkeys(Setting._fields, "N") | {"warmup": "F", "overlap": "F"}
_METAVARS |= dict.fromkeys(("step_time", "latency"), "TIME")
_METAVARS |= dict.fromkeys(("bandwidth", "local_bandwidth", "host_bandwidth"), "RATE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command ``onebit-jax``; bad input ends it with exit code 2."""
    parser = argparse.ArgumentParser(prog="onebit-jax")
    parser.add_argument("--version", action="version", version=f"%(prog)s {onebit_jax.__version__}")
    text = "predict the time, bytes and state of a run, and say whether 1-bit Adam pays"
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("plan", help=text, argument_default=argparse.SUPPRESS)
    described = dict(re.findall(r"^ +(\w+): (.*)$", Setting.__doc__ or "", re.MULTILINE))
    for name, metavar in _METAVARS.items():
        option, text = f"--{name.replace('_', '-')}", described.get(name)
        required, kind = name not in Setting._field_defaults, _PARSERS[metavar]
        command.add_argument(option, metavar=metavar, type=kind, help=text, required=required)
    text = "print compute utilization over bandwidths and sync intervals instead"
    command.add_argument("--utilization", action="store_true", default=False, help=text)
    options = vars(parser.parse_args(arguments))
    make = utilization if options.pop("utilization") else plan
    try:
        print(make(Setting(**options)))
    except ValueError as error:
        command.error(str(error))
