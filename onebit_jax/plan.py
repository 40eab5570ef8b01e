r"""Whether one bit pays: predicts a run's time and volume before any code is changed.

There are :math:`n` workers on :math:`N` nodes of :math:`L` devices, :math:`d` parameters and
:math:`b` bytes a parameter on the wire. Each exchange is one or more collectives, one after
another, and a collective takes as long as the busier of two links, plus its messages' latency:

.. math::

    t = \max\left(\frac{\text{bytes through a node's card}}{\text{bandwidth}},
                  \frac{\text{bytes a device sends inside its node}}{\text{local bandwidth}}\right)
        + \frac{\text{bytes through a node's card}}{\text{host bandwidth}}
        + \text{messages} \cdot \text{latency}

===================  ===========================  =======================  =============
collective           through a card               inside, a device         messages
===================  ===========================  =======================  =============
dense all-reduce     :math:`2 (N-1)/N \; b d`     :math:`2 (L-1)/L \; bd`  :math:`2(N-1)`
flat all-to-all      :math:`L (n-L)/n \; b d`     :math:`(L-1)/n \; b d`   :math:`n-L`
flat all-gather      :math:`(n-1)/n \; b d`       :math:`(n-1)/n \; b d`   :math:`N-1`
local reduce-scatter                              :math:`(L-1)/L \; 4 d`
EC1 between nodes    :math:`2 (N-1)/N \; b d`                              :math:`2(N-1)`
local all-gather                                  :math:`(L-1)/L \; b d`
===================  ===========================  =======================  =============

The last three are the hierarchical exchange, which with one device a node is the flat one, and on
one node the dense one in float32. Inside one node nothing crosses a card and latency is left out.
The dense all-reduce is given the least that any all-reduce can send between nodes, and the one-bit
exchange what the collectives of XLA send, so that in doubt dense comes out ahead.

A step is its own compute, the exchange, and the work that the exchange makes on each device; none
of them overlap. A run is its warm-up, dense in float32, and the steps after it.
"""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

_ADAM_ALONE = "Adam, no exchange"
_FLOAT32_BYTES = 4.0
# A gain below the first is within what the model leaves out; below the second it is none.
_WORTHWHILE, _NONE = 1.1, 1.02


class Optimizer(NamedTuple):
    """A row of the table.

    Attributes:
      name: as it is printed.
      exchange: the collectives it uses; the module's table says what they send.
      bytes_per_parameter: on the wire, after the warm-up if it has one.
      benchmark: the kind of ``benchmarks.step`` that calibrates it. Its warm-up is calibrated by
        the kind of that name with ``", warm-up"`` after it.
      rounds: share of the steps after the warm-up in which it exchanges anything.
      warmup: whether a run begins with dense steps in float32.
      encoding_bytes: bytes an element that encoding and decoding read and write beyond what Adam's
        own update does.
      advised: whether the advice may be to use it: for a dense run's loss alone, and with nothing
        else to choose.
    """

    name: str
    exchange: Literal["dense", "flat", "hierarchical"]
    bytes_per_parameter: float
    benchmark: str
    rounds: float = 1.0
    warmup: bool = False
    encoding_bytes: float = 0.0
    advised: bool = False


FLOAT32 = Optimizer("dense float32", "dense", _FLOAT32_BYTES, "Adam with pmean")
BFLOAT16 = Optimizer("dense bfloat16", "dense", 2, "Adam with pmean")
# 13 bytes is the step's passes over memory less Adam's 28: the worker reads g and c, writes c and
# reads it for the scale and for the signs (20); the server does so with its chunk (16 / n, at most
# 8); decoding reads the reciprocal root and the parameter and writes it (12); bits are under 1.
ONEBIT_ADAM = Optimizer(
    "1-bit Adam, flat", "flat", 1 / 8, "1-bit Adam", warmup=True, encoding_bytes=13, advised=True
)
ONEBIT_ADAM_HIERARCHICAL = ONEBIT_ADAM._replace(
    name="1-bit Adam, hierarchical", exchange="hierarchical"
)
# Besides what 1-bit Adam does it brings the gradients into one block (8) and goes twice over the
# fresh variance, the reciprocal root and the parameters (8 + 4 + 4 + 4).
ONEBIT_LAMB = Optimizer(
    "1-bit LAMB", "hierarchical", 1 / 8, "1-bit LAMB", warmup=True, encoding_bytes=41
)
# The published step sets exchange in this share of the paper's 152,000 updates, of which 12,500
# come before the freeze; refreshes of the variance are 1 in 1,000. Besides what 1-bit Adam does, a
# sync reads B and y and writes them, less m's decoding (14).
ZERO_ONE_ADAM = Optimizer(
    "0/1 Adam", "flat", 1 / 8, "0/1 Adam, sync", rounds=0.49, encoding_bytes=27
)
# No scales or residuals: Birder reads both averages once more to draw signs, and the two others
# read and write less than Adam does.
BIRDER = Optimizer("Birder", "hierarchical", 1 / 8, "Birder", encoding_bytes=8)
SIGNUM = Optimizer("Signum", "flat", 1 / 8, "Signum")
DISTRIBUTED_LION = Optimizer("Distributed Lion", "flat", 1 / 8, "Distributed Lion")
EF_SIGNSGD = Optimizer("EF sign SGD", "flat", 1 / 8, "EF sign SGD", encoding_bytes=13)
ONEBIT = (
    ONEBIT_ADAM,
    ONEBIT_ADAM_HIERARCHICAL,
    ONEBIT_LAMB,
    ZERO_ONE_ADAM,
    BIRDER,
    SIGNUM,
    DISTRIBUTED_LION,
    EF_SIGNSGD,
)
CALIBRATED_KINDS = frozenset(
    {_ADAM_ALONE}
    | {row.benchmark for row in (FLOAT32, BFLOAT16, *ONEBIT)}
    | {f"{row.benchmark}, warm-up" for row in ONEBIT if row.warmup}
)


class Setting(NamedTuple):
    """A training run and the machines it is for. Every bandwidth is in bit/s, each way.

    Attributes:
      parameters: of the model.
      workers: devices that train, one replica each.
      bandwidth: of one node's network card.
      step_time: seconds of a step's own compute: forward, backward and Adam, without exchange.
      steps: of the run.
      warmup: share of them that a one-bit optimizer makes dense.
      per_node: devices that share a card.
      latency: seconds that one message takes between nodes, however small it is.
      local_bandwidth: between the devices of a node; the default is PCIe 4.0 x16's 25 GB/s.
      memory_bandwidth: of one device; the default is 1 TB/s. A calibration replaces it.
      efficiency: the share of ``bandwidth`` that a collective reaches.
      host_bandwidth: at which a node's own software moves bytes between its memory and its card:
        copies and system calls of sockets, which come on top of the wire. None where the card
        reads memory by itself, as RDMA does.
      calibration: seconds an element of each kind of step, from :func:`read_calibration`.
    """

    parameters: int
    workers: int
    bandwidth: float
    step_time: float
    steps: int
    warmup: float = 0.15
    per_node: int = 1
    latency: float = 50e-6
    local_bandwidth: float = 200e9
    memory_bandwidth: float = 8e12
    efficiency: float = 1.0
    host_bandwidth: float = math.inf
    calibration: Mapping[str, float] | None = None


class Prediction(NamedTuple):
    """What is predicted of one optimizer. Bytes are those through one node's card, one way.

    Attributes:
      optimizer: the row it is for.
      exchange: seconds of an exchange, after the warm-up if there is one.
      work: seconds of the work on each device that an exchange brings with it.
      step: seconds of a step after the warm-up, on average.
      warmup_step: seconds of a warm-up step; None without a warm-up.
      run: seconds of the whole run.
      step_bytes: bytes of a step after the warm-up, on average.
      run_bytes: bytes of the whole run.
    """

    optimizer: Optimizer
    exchange: float
    work: float
    step: float
    warmup_step: float | None
    run: float
    step_bytes: float
    run_bytes: float


class Plan(NamedTuple):
    """A table of predictions and what follows from it.

    Attributes:
      setting: what was asked.
      dense: predictions for float32 and bfloat16, in this order.
      onebit: predictions for each of :data:`ONEBIT`.
      thresholds: for each one-bit optimizer's name, the bandwidths in bit/s below which a run ends
        sooner than with dense float32 and bfloat16; ``inf`` if at any, 0 if below none.
      advice: one or more sentences.
    """

    setting: Setting
    dense: tuple[Prediction, ...]
    onebit: tuple[Prediction, ...]
    thresholds: dict[str, tuple[float, float]]
    advice: str


class _Collective(NamedTuple):
    """Bytes through a node's card, bytes a device sends inside its node, messages between nodes."""

    card: float
    inside: float
    messages: int


def plan(setting: Setting) -> Plan:
    """Predicts what each optimizer would make of a run.

    Args:
      setting: the run and the machines.

    Raises:
      ValueError: for a field outside its range, or a calibration without a kind that is needed.

    >>> setting = Setting(
    ...     parameters=340_000_000,
    ...     workers=64,
    ...     per_node=4,
    ...     bandwidth=10e9,
    ...     step_time=0.45,
    ...     steps=150_000,
    ... )
    >>> print(plan(setting).advice)
    1-bit Adam, hierarchical, ends 1.7 times sooner than dense bfloat16 here: use it.
    """
    _check(setting)
    dense = tuple(predict(optimizer, setting) for optimizer in (FLOAT32, BFLOAT16))
    onebit = tuple(predict(optimizer, setting) for optimizer in ONEBIT)
    thresholds = {
        optimizer.name: (
            _threshold(optimizer, FLOAT32, setting),
            _threshold(optimizer, BFLOAT16, setting),
        )
        for optimizer in ONEBIT
    }
    advice = _advice(setting, dense[1], onebit, thresholds)
    return Plan(setting, dense, onebit, thresholds, advice)


def predict(optimizer: Optimizer, setting: Setting) -> Prediction:
    """Predicts a run with one optimizer; :func:`plan` checks the setting, this does not."""
    collectives = _collectives(optimizer.exchange, optimizer.bytes_per_parameter, setting)
    exchange = _seconds(collectives, setting)
    work = _work(optimizer.benchmark, optimizer.encoding_bytes, setting)
    step = setting.step_time + optimizer.rounds * (exchange + work)
    step_bytes = optimizer.rounds * sum(c.card for c in collectives)
    if not optimizer.warmup:
        run, run_bytes = setting.steps * step, setting.steps * step_bytes
        return Prediction(optimizer, exchange, work, step, None, run, step_bytes, run_bytes)
    dense = _collectives("dense", _FLOAT32_BYTES, setting)
    warmup_step = (
        setting.step_time
        + _seconds(dense, setting)
        + _work(f"{optimizer.benchmark}, warm-up", 0.0, setting)
    )
    share, steps = setting.warmup, setting.steps
    run = steps * (share * warmup_step + (1 - share) * step)
    run_bytes = steps * (share * sum(c.card for c in dense) + (1 - share) * step_bytes)
    return Prediction(optimizer, exchange, work, step, warmup_step, run, step_bytes, run_bytes)


def _collectives(
    exchange: Literal["dense", "flat", "hierarchical"], bytes_per_parameter: float, setting: Setting
) -> list[_Collective]:
    """The module's table, for one exchange."""
    n, L = setting.workers, setting.per_node
    N = n // L
    size = setting.parameters * bytes_per_parameter
    full = setting.parameters * _FLOAT32_BYTES
    between = _Collective(2 * (N - 1) / N * size, 0.0, 2 * (N - 1))
    if exchange == "dense":
        return [between._replace(inside=2 * (L - 1) / L * size)]
    if exchange == "hierarchical" and N == 1:
        return [_Collective(0.0, 2 * (L - 1) / L * full, 0)]
    if exchange == "hierarchical" and L > 1:
        return [
            _Collective(0.0, (L - 1) / L * full, 0),
            between,
            _Collective(0.0, (L - 1) / L * size, 0),
        ]
    # An all-to-all fuses nothing: each device sends through the card for itself. A ring goes
    # through it once, whatever the number of devices behind it.
    ring = (n - 1) / n * size
    return [
        _Collective(L * (n - L) / n * size, (L - 1) / n * size, n - L),
        _Collective(ring if N > 1 else 0.0, ring if L > 1 else 0.0, N - 1),
    ]


def _seconds(collectives: list[_Collective], setting: Setting) -> float:
    return sum(
        max(
            8 * c.card / (setting.bandwidth * setting.efficiency),
            8 * c.inside / setting.local_bandwidth,
        )
        + 8 * c.card / setting.host_bandwidth
        + c.messages * setting.latency
        for c in collectives
    )


def _work(benchmark: str, encoding_bytes: float, setting: Setting) -> float:
    """Seconds a device works for an exchange, beyond Adam's update: measured, or memory's."""
    if setting.calibration is None:
        return 8 * setting.parameters * encoding_bytes / setting.memory_bandwidth
    extra = setting.calibration[benchmark] - setting.calibration[_ADAM_ALONE]
    return setting.parameters * extra


def _threshold(optimizer: Optimizer, dense: Optimizer, setting: Setting) -> float:
    """The bandwidth below which a run ends sooner; ``inf`` if at any, 0 if below none."""

    def sooner(exponent: float) -> bool:
        at = setting._replace(bandwidth=10**exponent)
        return predict(optimizer, at).run < predict(dense, at).run

    # A search, not a bisection from end to end: where the local links come to limit the dense
    # exchange first, one bit may lose in between and win again. From a bit to an exabit a second.
    steps_a_decade = 20
    exponents = (i / steps_a_decade for i in range(18 * steps_a_decade + 1))
    high = next((exponent for exponent in exponents if not sooner(exponent)), math.inf)
    if high in (0, math.inf):
        return high
    low = high - 1 / steps_a_decade
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sooner(middle) else (low, middle)
    return 10**low


def _advice(
    setting: Setting,
    dense: Prediction,
    onebit: tuple[Prediction, ...],
    thresholds: dict[str, tuple[float, float]],
) -> str:
    best = min((p for p in onebit if p.optimizer.advised), key=lambda p: p.run)
    name, gain = best.optimizer.name, dense.run / best.run
    against = dense.optimizer.name
    if gain >= _WORTHWHILE:
        sentences = [f"{name}, ends {gain:.1f} times sooner than {against} here: use it."]
    else:
        verdict = "Hardly worth it" if gain > _NONE else "Do not use it"
        change = f"{abs(1 - 1 / gain):.1%} {'sooner' if gain > 1 else 'later'}"
        # A calibration's noise can make an exchange's work seem to take less than nothing.
        most = max(1.0, dense.step / setting.step_time)
        sentences = [
            f"{verdict}: {name}, would end {change} than {against}.",
            f"The exchange is {1 - 1 / most:.0%} of a {against} step: no compression could end "
            f"more than {most:.2f} times sooner.",
        ]
        below = thresholds[name][1]
        if gain <= 1 and 0 < below < math.inf:
            sentences.append(f"It would end sooner below {_rate(below)}.")
    return " ".join(sentences).replace("%", " %")


def table(plan: Plan) -> str:
    """Plain text: the predictions, the bandwidths from which one bit pays, and the advice."""
    setting = plan.setting
    header = ["", "exchange", "work", "a step", "warm-up step", "run", "a node sends", "in all"]
    rows = [header]
    for p in (*plan.dense, *plan.onebit):
        warmup_step = "" if p.warmup_step is None else _time(p.warmup_step)
        times = [_time(p.exchange), _time(p.work), _time(p.step), warmup_step, _time(p.run)]
        rows.append([p.optimizer.name, *times, _size(p.step_bytes), _size(p.run_bytes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{setting.parameters:,} parameters, {setting.workers} workers, {setting.per_node} a node,"
        f" {_rate(setting.bandwidth)} a node, {_time(setting.step_time)} of compute a step",
        "",
        *(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ),
    ]
    lines.append("")
    for name, (float32, bfloat16) in plan.thresholds.items():
        lines.append(
            f"{name}, ends sooner than dense float32 {_below(float32)}, "
            f"than dense bfloat16 {_below(bfloat16)}."
        )
    return "\n".join([*lines, "", plan.advice])


def _below(bandwidth: float) -> str:
    if bandwidth == 0:
        return "below none"
    return "at any bandwidth" if math.isinf(bandwidth) else f"below {_rate(bandwidth)}"


def _scaled(value: float, prefixes: str) -> tuple[float, str]:
    """The value by the largest power of 1000 that leaves at least 1, and that power's prefix."""
    power = 0
    while value >= 1000 and power < len(prefixes):
        value, power = value / 1000, power + 1
    return value, f" {prefixes[power - 1]}" if power else " "


def _rate(bandwidth: float) -> str:
    value, prefix = _scaled(bandwidth, "kMGTPE")
    return f"{value:.3g}{prefix}bit/s"


def _size(count: float) -> str:
    value, prefix = _scaled(count, "kMGTPE")
    return f"{value:.3g}{prefix}B"


def _time(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{1e3 * seconds:.1f} ms"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.2f} s"


_BITS = {"": 1, "bit": 1, "B": 8}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)"


def parse_rate(field: str, text: str) -> float:
    """Reads a bandwidth in bit/s.

    Args:
      field: its name, for the error.
      text: such as ``10Gbit``, ``100 Mbit/s``, ``25GB`` (bytes) or a plain number of bit/s.

    >>> parse_rate("bandwidth", "10Gbit"), parse_rate("local_bandwidth", "25GB/s")
    (10000000000.0, 200000000000.0)
    """
    match = re.fullmatch(_NUMBER + r"\s*([kMGT]?)(bit|B|)(?:/s)?", text.strip())
    if not match or (match[2] and not match[3]):
        raise ValueError(
            f"{field}={text!r} must be a rate such as 10Gbit or 100Mbit, or 25GB for bytes; a "
            f"plain number is in bit/s. Write the unit out as bit or B."
        )
    return float(match[1]) * _PREFIXES[match[2]] * _BITS[match[3]]


def parse_seconds(field: str, text: str) -> float:
    """Reads a duration in seconds.

    Args:
      field: its name, for the error.
      text: such as ``50us``, ``450ms`` or a plain number of seconds.

    >>> parse_seconds("step_time", "450ms")
    0.45
    """
    match = re.fullmatch(_NUMBER + r"\s*(s|ms|us|)", text.strip())
    if not match:
        raise ValueError(
            f"{field}={text!r} must be a duration such as 50us, 450ms or 0.45s; a plain number is "
            f"in seconds."
        )
    return float(match[1]) * _DURATIONS[match[2]]


def read_calibration(path: pathlib.Path) -> dict[str, float]:
    """Reads what ``python -m benchmarks.step`` wrote.

    Args:
      path: its JSON file.

    Returns:
      Median seconds an element of each kind of step.

    Raises:
      ValueError: for a file that is missing or is not one of that program's.
    """
    mend = "Make one with: python -m benchmarks.step --json FILE"
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
        elements = int(figures["elements"])
        return {
            kind: statistics.median(map(float, figure["seconds"])) / elements
            for kind, figure in figures["kinds"].items()
        }
    except OSError as error:
        raise ValueError(
            f"calibration={str(path)!r} cannot be read ({error.strerror}). {mend}."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"calibration={str(path)!r} is no record of benchmarks.step ({error!r}): expected "
            f"figures.elements and figures.kinds[...].seconds. {mend}."
        ) from None


def _check(setting: Setting) -> None:
    def number(field: str, holds: Callable[[float], bool], expected: str) -> None:
        value = getattr(setting, field)
        if not isinstance(value, (int, float)) or not holds(value):
            raise ValueError(f"{field}={value!r} must be {expected}.")

    for field, least, mend in (
        ("parameters", 1, "the parameters of the model"),
        ("workers", 2, "a single worker exchanges nothing and gains nothing"),
        ("per_node", 1, "the devices that share a network card"),
        ("steps", 1, "the steps of the run"),
    ):
        value = getattr(setting, field)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{field}={value!r} must be an int of at least {least}: {mend}.")
    for field in ("bandwidth", "step_time", "local_bandwidth", "memory_bandwidth"):
        unit = "seconds" if field == "step_time" else "bit/s"
        number(field, lambda x: 0 < x < math.inf, f"above 0 and finite, in {unit}")
    number("latency", lambda x: 0 <= x < math.inf, "at least 0 and finite, in seconds")
    number("warmup", lambda x: 0 <= x <= 1, "in [0, 1]: the share of the steps that are dense")
    number("host_bandwidth", lambda x: x > 0, "above 0, in bit/s")
    number("efficiency", lambda x: 0 < x <= 1, "in (0, 1]: the share of the bandwidth")
    if setting.workers % setting.per_node:
        raise ValueError(
            f"workers={setting.workers} must be a multiple of per_node={setting.per_node}: all "
            f"nodes have the same number of devices. Change one of the two."
        )
    if setting.calibration is not None:
        if missing := sorted(CALIBRATED_KINDS - setting.calibration.keys()):
            raise ValueError(
                f"calibration has the kinds {sorted(setting.calibration)}, but needs {missing} "
                f"too. Make a new one with: python -m benchmarks.step --json FILE."
            )
        for kind in sorted(CALIBRATED_KINDS):
            value = setting.calibration[kind]
            if not 0 < value < math.inf:
                raise ValueError(
                    f"calibration[{kind!r}]={value!r} must be above 0 and finite, in seconds an "
                    f"element."
                )
