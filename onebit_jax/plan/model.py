r"""The model: how long a step and a run take, and what they send.

There are :math:`n` workers on :math:`N` nodes of :math:`L` devices, :math:`d` parameters and
:math:`b` bytes per parameter on the wire. Each exchange is one or more collectives, one after
another, and a collective takes as long as the busier of two links, plus its messages' latency:

.. math::

    t = \max\left(\frac{\text{bytes through a node's card}}{\text{bandwidth}},
                  \frac{\text{bytes a device sends inside its node}}{\text{local bandwidth}}\right)
        + \frac{\text{bytes through a node's card}}{\text{host bandwidth}}
        + \text{messages} \cdot \text{latency}

====================  ===========================  =======================  =============
collective            through a card               inside, a device         messages
====================  ===========================  =======================  =============
dense all-reduce      :math:`2 (N-1)/N \; b d`     :math:`2 (L-1)/L \; bd`  :math:`2(N-1)`
flat all-to-all       :math:`L (n-L)/n \; b d`     :math:`(L-1)/n \; b d`   :math:`n-L`
flat all-gather       :math:`(n-1)/n \; b d`       :math:`(n-1)/n \; b d`   :math:`N-1`
local reduce-scatter                               :math:`(L-1)/L \; 4 d`
EC1 between nodes     :math:`2 (N-1)/N \; b d`                              :math:`2(N-1)`
local all-gather                                   :math:`(L-1)/L \; b d`
====================  ===========================  =======================  =============

The last three are the hierarchical exchange, which with one device a node is the flat one, and on
one node the dense one in float32. Inside one node nothing crosses a card and latency is left out.

Where a worker's model is split over :math:`m` devices, each of them exchanges :math:`d / m`
parameters with those at its place of other workers, all of them at once: a device sends and works
:math:`1/m` of the above. A node then holds :math:`L = 1` part of a worker, whose bytes share the
cards of its nodes, or :math:`L` whole workers, whose bytes share one.
The dense all-reduce is assumed to send the least that any all-reduce can send between nodes, the
one-bit exchange what XLA's collectives send: in doubt the model favours dense, but for overlap.

The time of a step is the sum of its compute, the exchange, and the work that the exchange causes on
each device. An exchange that every step makes, dense or not, is hidden while gradients still
arrive, the share ``overlap`` of a step's compute, 0 unless it is given; one whose mean is applied
one step late, by all of the compute. A run is its warm-up, whose gradients travel in
``warmup_bits``, never hidden, and the steps after it: 32 and 16 are dense all-reduces, 8 and 4 the
optimizer's exchange at that many bits. An optimizer whose variance is refreshed makes that exchange
again in 16 steps of each octave. 0/1 Adam refreshes its variance, dense in float32, and syncs in
its published step sets. If only some steps exchange, their time and bytes are averaged
over all steps.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onebit_jax import validation
from onebit_jax.plan import calibration
from onebit_jax.plan.optimizers import (
    FLOAT32_BYTES,
    LOCAL_BITS,
    WARMUP_BITS,
    Form,
    Optimizer,
    bytes_at,
    encoding_bytes_at,
)
from onebit_jax.transforms.step_sets import (
    count_of_published_sync_steps,
    count_of_published_variance_steps,
)
from onebit_jax.transforms.zero_one_adam import zero_one_adam

# In an octave of updates, by `step_sets.published_variance_steps(16)`.
_REFRESHES = 16
# Between these are all numbers of a run or a machine, so that products of them are finite.
_LEAST, _MOST = 1e-24, 1e24


class Setting(NamedTuple):
    """A training run and the machines it is for. Every bandwidth is in bit/s, each way.

    Attributes:
      parameters: of the model.
      workers: replicas of the model that train, one device each, or ``shards`` devices.
      bandwidth: of one node's network card.
      step_time: seconds of a step's own compute: forward, backward and Adam, without exchange.
      steps: of the run.
      warmup: share of them that is an optimizer's warm-up, if it has one.
      per_node: devices that share a card.
      latency: seconds that one message takes between nodes, however small it is.
      local_bandwidth: between the devices of a node; the default is PCIe 4.0 x16's 25 GB/s.
      memory_bandwidth: of one device; the default is 1 TB/s. A calibration replaces it.
      efficiency: the share of ``bandwidth`` that a collective reaches.
      host_bandwidth: at which a node's own software moves bytes between its memory and its card:
        copies and system calls of sockets, which come on top of the wire. Infinite where the
        card reads memory by itself, as RDMA does.
      calibration: seconds an element of each kind of step, from
        :func:`~onebit_jax.plan.read_calibration`.
      warmup_bits: of the gradients that a warm-up averages: 32, 16 (bfloat16), 8 or 4.
      every: number of steps from one exchange of local steps to the next.
      local_bits: per value that local steps exchange, beside 32: 8, 4, 2 or 1; 32 for no such row.
      shards: devices of each worker, over whose fast links the model is split; what crosses these
        is a part of ``step_time``.
      overlap: the share of ``step_time`` during which gradients that are ready travel already:
        about 2/3, the backward pass, with buckets; 0 where a step computes first, then sends.
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
    warmup_bits: int = 4
    every: int = 30
    local_bits: int = 4
    shards: int = 1
    overlap: float = 0.0

    @property
    def workers_per_node(self) -> int:
        """Workers that share a card; 1 if they lie on several nodes each."""
        return max(1, self.per_node // self.shards)


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


class _Collective(NamedTuple):
    """Bytes through a node's card, bytes a device sends inside its node, messages between nodes."""

    card: float
    inside: float
    messages: int


def predict(optimizer: Optimizer, setting: Setting) -> Prediction:
    """Predicts a run with one optimizer, for a setting that ``check`` has checked."""
    exchange, sent = _exchange(optimizer.exchange, optimizer.bytes_per_parameter, setting)
    work = _work(optimizer.benchmark, optimizer.encoding_bytes, setting)
    every_step = optimizer.rounds == 1 and not optimizer.published_steps
    beside_backward = every_step and not optimizer.local
    hidden = 1.0 if optimizer.late else setting.overlap if beside_backward else 0.0
    waited = _waited(exchange, setting.step_time, hidden)
    step = setting.step_time + optimizer.rounds * (waited + work)
    step_bytes = optimizer.rounds * sent
    steps = setting.steps
    if optimizer.published_steps:
        return _in_published_steps(optimizer, exchange, work, waited, sent, setting)
    if not optimizer.warmup:
        run, run_bytes = steps * step, steps * step_bytes
        return Prediction(optimizer, exchange, work, step, None, run, step_bytes, run_bytes)
    bits, share = setting.warmup_bits, setting.warmup
    form, encoding = ("dense", 0.0) if bits >= 16 else (optimizer.exchange, encoding_bytes_at(bits))
    warming, warming_bytes = _exchange(form, bytes_at(bits), setting)
    # Which XLA for GPUs does not hide.
    added = warming + _work(optimizer.kinds(bits)[-1], encoding, setting)
    warmup_step = setting.step_time + added
    run = steps * (share * warmup_step + (1 - share) * step)
    run_bytes = steps * (share * warming_bytes + (1 - share) * step_bytes)
    if optimizer.refreshed:
        refreshes = _refreshes(share * steps, steps)
        run += refreshes * added
        run_bytes += refreshes * warming_bytes
    return Prediction(optimizer, exchange, work, step, warmup_step, run, step_bytes, run_bytes)


def _in_published_steps(
    optimizer: Optimizer,
    exchange: float,
    work: float,
    waited: float,
    sent: float,
    setting: Setting,
) -> Prediction:
    """0/1 Adam: before the freeze it refreshes, dense, or compresses; then it syncs or is local."""
    freeze = min(max(1, round(setting.warmup * setting.steps)), setting.steps)
    refreshes, syncs = _published_counts(freeze, setting.steps)
    dense, dense_bytes = _exchange("dense", FLOAT32_BYTES, setting)
    compressions, later = freeze - refreshes, setting.steps - freeze
    before = refreshes * dense + compressions * (waited + work)
    after = syncs * (waited + work)
    run = setting.steps * setting.step_time + before + after
    run_bytes = refreshes * dense_bytes + (compressions + syncs) * sent
    share = syncs / later if later else 1.0
    return Prediction(
        optimizer,
        exchange,
        work,
        setting.step_time + share * (waited + work),
        setting.step_time + before / freeze,
        run,
        share * sent,
        run_bytes,
    )


@functools.lru_cache(maxsize=64)
def _published_counts(freeze: int, steps: int) -> tuple[int, int]:
    """How many updates refresh the variance, and how many sync after the freeze."""
    defaults = inspect.signature(zero_one_adam).parameters
    scaler, *gaps = (
        defaults[name].default
        for name in ("var_update_scaler", "local_step_scaler", "local_step_clipper")
    )
    refreshes = count_of_published_variance_steps(freeze, scaler)
    return refreshes, count_of_published_sync_steps(steps - freeze, *gaps)


def covered(optimizers: Sequence[Optimizer], setting: Setting) -> list[Optimizer]:
    """Those whose kinds the setting's calibration has; without one all."""
    kinds = setting.calibration
    return [
        x for x in optimizers if kinds is None or kinds.keys() >= {*x.kinds(setting.warmup_bits)}
    ]


def _refreshes(begin: float, end: float) -> float:
    """How many refreshes fall between two updates: 16 in each octave, but one an update at most."""
    begin = min(max(begin, 1.0), end)
    return min(_REFRESHES * math.log2(end / begin), end - begin)


def _exchange(form: Form, bytes_per_parameter: float, setting: Setting) -> tuple[float, float]:
    """Seconds of an exchange, and its bytes through a node's card."""
    through_card = min(1.0, setting.per_node / setting.shards)
    seconds = sent = 0.0
    for of_worker in _collectives(form, bytes_per_parameter, setting):
        card, inside = of_worker.card * through_card, of_worker.inside / setting.shards
        on_card = 8 * card / (setting.bandwidth * setting.efficiency)
        busier = max(on_card, 8 * inside / setting.local_bandwidth)
        in_host = 8 * card / setting.host_bandwidth
        seconds += busier + in_host + of_worker.messages * setting.latency
        sent += card
    return seconds, sent


def _collectives(form: Form, bytes_per_parameter: float, setting: Setting) -> list[_Collective]:
    """The module's table, for all of a worker's devices together and one card."""
    n, L = setting.workers, setting.workers_per_node
    N = n // L
    size = setting.parameters * bytes_per_parameter
    full = setting.parameters * FLOAT32_BYTES
    between = _Collective(2 * (N - 1) / N * size, 0.0, 2 * (N - 1))
    if form == "dense":
        return [between._replace(inside=2 * (L - 1) / L * size)]
    if form == "hierarchical" and N == 1:
        return [_Collective(0.0, 2 * (L - 1) / L * full, 0)]
    if form == "hierarchical" and L > 1:
        return [
            _Collective(0.0, (L - 1) / L * full, 0),
            between,
            _Collective(0.0, (L - 1) / L * size, 0),
        ]
    # In an all-to-all each device of a node sends through the card. A ring passes it once, however
    # many devices share it.
    ring = (n - 1) / n * size
    return [
        _Collective(L * (n - L) / n * size, (L - 1) / n * size, n - L),
        _Collective(ring if N > 1 else 0.0, ring if L > 1 else 0.0, N - 1),
    ]


def _waited(exchange: float, step_time: float, overlap: float) -> float:
    """Seconds of an exchange that computing, for this share of a step, does not hide."""
    return max(0.0, exchange - overlap * step_time)


def _work(benchmark: str, encoding_bytes: float, setting: Setting) -> float:
    """Seconds a device works for an exchange, beyond Adam's update: measured, or memory's."""
    held = setting.parameters / setting.shards
    if setting.calibration is None:
        return 8 * held * encoding_bytes / setting.memory_bandwidth
    extra = setting.calibration[benchmark] - setting.calibration[calibration.ADAM_ALONE]
    return held * extra


def check(setting: Setting) -> None:
    """Raises ``ValueError`` for a field outside its range, or a calibration unfit for advice."""
    for field, least, mend in (
        ("parameters", 1, "the parameters of the model"),
        ("workers", 2, "a single worker exchanges nothing and gains nothing"),
        ("per_node", 1, "the devices that share a network card"),
        ("steps", 1, "the steps of the run"),
        ("every", 1, "the steps from one exchange of local steps to the next"),
        ("shards", 1, "the devices that a worker's model is split over"),
    ):
        value = getattr(setting, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{field}={value!r} must be an int of at least {least}: {mend}.")
        if value > _MOST:
            raise ValueError(f"{field} must be at most {_MOST:.0e}: {mend}.")
    if setting.workers >= 2**31:
        raise ValueError(
            f"workers={setting.workers} must be below 2**31: JAX numbers devices in 32 bits."
        )
    span = f"from {_LEAST:.0e} to {_MOST:.0e}"
    rate = f"above 0 and finite, in bit/s, {span}"
    for field, low, high, expected in (
        ("bandwidth", _LEAST, _MOST, rate),
        ("step_time", _LEAST, _MOST, f"above 0 and finite, in seconds, {span}"),
        ("local_bandwidth", _LEAST, _MOST, rate),
        ("memory_bandwidth", _LEAST, _MOST, rate),
        ("latency", 0, _MOST, f"at least 0, at most {_MOST:.0e}, in seconds"),
        ("warmup", 0, 1, "in [0, 1]: the share of the steps before one bit"),
        ("overlap", 0, 1, "in [0, 1]: the share of a step that hides exchanges"),
        ("host_bandwidth", _LEAST, math.inf, f"above 0, in bit/s, {_LEAST:.0e} or more"),
        ("efficiency", _LEAST, 1, f"in (0, 1]: the share of the bandwidth, {_LEAST:.0e} or more"),
    ):
        value = getattr(setting, field)
        if not validation.is_real(value) or not low <= value <= high:
            raise ValueError(f"{field}={value!r} must be {expected}.")
    for field, allowed in (("warmup_bits", WARMUP_BITS), ("local_bits", LOCAL_BITS)):
        value = getattr(setting, field)
        if not validation.is_real(value) or value not in allowed:
            *others, last = map(str, allowed)
            raise ValueError(
                f"{field}={value!r} must be {', '.join(others)} or {last}, bits per value."
            )
    if setting.per_node % setting.shards and setting.shards % setting.per_node:
        raise ValueError(
            f"shards={setting.shards} must divide per_node={setting.per_node}, or be a multiple of "
            f"it: a node has whole workers, or a worker whole nodes. Change one of the two."
        )
    if setting.workers % setting.workers_per_node:
        fit = f" / shards={setting.shards}" if setting.shards > 1 else ""
        raise ValueError(
            f"workers={setting.workers} must be a multiple of per_node={setting.per_node}{fit}: "
            f"all nodes have the same number of devices. Change one of the two."
        )
    if setting.calibration is not None:
        if not isinstance(setting.calibration, Mapping):
            raise ValueError(
                f"calibration={setting.calibration!r} must be what plan.read_calibration returns: "
                f"seconds an element of each kind of step."
            )
        calibration.check(setting.calibration, setting.warmup_bits)
