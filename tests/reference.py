"""The algorithms in plain NumPy, as the papers write them: what the fast paths are held to.

Everything is a list over workers; a tensor is flat and unpadded, and nothing is packed.
"""

from typing import Any, NamedTuple

import numpy as np


def sgn(z):
    return np.where(z >= 0, np.float32(1), np.float32(-1))


def scale(z, kind="rms"):
    """`s(z)`: 0 for an empty vector."""
    if not z.size:
        return np.float32(0)
    z = z.astype(np.float64)
    return np.float32(np.sqrt(np.mean(z**2)) if kind == "rms" else np.mean(np.abs(z)))


def chunk_size(shape, workers):
    """Elements of a chunk: whole bytes, and whole rows if these are at most 1 in 32 more."""
    parts = 8 * workers
    padding = -shape[0] % parts
    if len(shape) > 1 and 32 * padding <= shape[0]:
        return (shape[0] + padding) // workers * int(np.prod(shape[1:]))
    return 8 * -(-int(np.prod(shape)) // parts)


def chunk_bounds(size, workers, chunk=None):
    """Where each worker's chunk begins and ends: whole bytes but for the last elements."""
    chunk = 8 * -(-size // (8 * workers)) if chunk is None else chunk
    return [(min(j * chunk, size), min((j + 1) * chunk, size)) for j in range(workers)]


class Residuals(NamedTuple):
    """`e[i]`: worker i's, the size of the block; `E[j]`: server j's, the size of its chunk."""

    e: list
    E: list


def zero_residuals(size, workers, chunk=None):
    return Residuals(
        [np.zeros(size, np.float32) for _ in range(workers)],
        [np.zeros(hi - lo, np.float32) for lo, hi in chunk_bounds(size, workers, chunk)],
    )


def ec1(z, residuals, active=None, kind="rms", chunk=None):
    """Error-compensated one-bit all-reduce of one block; inactive elements come back as 0."""
    workers, size = len(z), z[0].size
    active = np.ones(size, bool) if active is None else active
    sent, new_e = [], []
    for i in range(workers):
        c = np.where(active, z[i].astype(np.float32) + residuals.e[i], np.float32(0))
        decoded = np.where(active, scale(c[active], kind) * sgn(c), np.float32(0))
        sent.append(decoded)
        new_e.append(c - decoded)
    result, new_E = np.zeros(size, np.float32), []
    for j, (lo, hi) in enumerate(chunk_bounds(size, workers, chunk)):
        on = active[lo:hi]
        a = np.mean([x[lo:hi] for x in sent], axis=0, dtype=np.float32)
        a = np.where(on, a + residuals.E[j], np.float32(0))
        decoded = np.where(on, scale(a[on], kind) * sgn(a), np.float32(0))
        result[lo:hi] = decoded
        new_E.append(a - decoded)
    return result, Residuals(new_e, new_E)


class Hierarchy:
    """EC1 between nodes of `per_node` devices each, the shards of one block one after another."""

    def __init__(self, size, nodes, per_node, shape=None):
        self.nodes, self.per_node = nodes, per_node
        self.chunk = chunk_size(shape or (size,), nodes * per_node)
        self.shards = chunk_bounds(size, per_node, nodes * self.chunk)
        self.residuals = [zero_residuals(hi - lo, nodes, self.chunk) for lo, hi in self.shards]

    def all_reduce(self, z, active=None, kind="rms"):
        """The mean of all devices' values, those of a node standing together in the list."""
        active = np.ones(z[0].size, bool) if active is None else active
        nodes = [z[k * self.per_node : (k + 1) * self.per_node] for k in range(self.nodes)]
        means = np.stack([np.mean(node, axis=0, dtype=np.float32) for node in nodes])
        if self.nodes == 1:
            return means[0]
        parts = []
        for i, (lo, hi) in enumerate(self.shards):
            shard = list(means[:, lo:hi])
            part, self.residuals[i] = ec1(shard, self.residuals[i], active[lo:hi], kind, self.chunk)
            parts.append(part)
        return np.concatenate(parts)


def bounded(u, bound, updates=None, b2=0.0):
    """`u`, no longer than the bound, which grows as an uncorrected `v` falls short."""
    grown = 1 if updates is None else np.sqrt(1 - b2**updates)
    return np.clip(u, -bound / grown, bound / grown)


class OnebitAdam:
    """1-bit Adam on one tensor, the same parameters on every worker.

    Options: `refreshes`, of v after the warm-up, a function of the number of updates made; `means`,
    an iterator of the mean gradients that warm-up and refreshes see, where those are not exact.
    """

    def __init__(self, p, workers, lr, b1, b2, eps, weight_decay, warmup, per_node=None, **options):
        self.bias_correction = options.get("bias_correction", False)
        self.scale = options.get("scale", "rms")
        self.refreshes, self.means = options.get("refreshes"), options.get("means")
        self.p = p.astype(np.float32).reshape(-1)
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.residuals = zero_residuals(self.p.size, workers)
        self.hierarchy = per_node and Hierarchy(self.p.size, workers // per_node, per_node)
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.weight_decay, self.warmup, self.count = weight_decay, warmup, 0
        self.variance_at = 0

    def mean(self, g):
        """The mean gradient that v is made of."""
        return next(self.means) if self.means else np.mean(g, axis=0, dtype=np.float32)

    def correction(self):
        """The divisor of v."""
        return 1 - self.b2**self.variance_at if self.bias_correction else 1

    def refresh(self, g):
        """v as if the gradient had been this one since it last changed."""
        mean, decay = self.mean(g), self.b2 ** (self.count + 1 - self.variance_at)
        on, self.variance_at = self.v > 0, self.count + 1
        self.m = np.where(on, self.m, 0)
        followed = decay * self.v + (1 - decay) * mean**2
        self.v = np.where(on, followed, mean**2 * self.correction())

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        if self.count < self.warmup:
            mean, self.variance_at = self.mean(g), self.count + 1
            self.m = self.b1 * self.m + (1 - self.b1) * mean
            self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        else:
            if self.refreshes and self.refreshes(self.count):
                self.refresh(g)
            m = [self.b1 * self.m + (1 - self.b1) * x for x in g]
            if self.hierarchy:
                self.m = self.hierarchy.all_reduce(m, self.v > 0, self.scale)
            else:
                self.m, self.residuals = ec1(m, self.residuals, self.v > 0, self.scale)
        self.count += 1
        m, v = self.m, self.v / self.correction()
        if self.bias_correction:
            m = m / (1 - self.b1**self.count)
        u = np.where(v > 0, m / (np.sqrt(v) + self.eps), 0)
        if self.count > self.warmup:
            u = bounded(u, 3, None if self.bias_correction else self.variance_at, self.b2)
        self.p = (self.p - self.step(u)).astype(np.float32)
        return self.p

    def step(self, u):
        """The step of the parameters, once the update is counted."""
        return self.lr * (u + self.weight_decay * self.p)


class ZeroOneAdam:
    """0/1 Adam on one tensor; `p[i]` are worker i's parameters, the step sets functions."""

    def __init__(
        self, p, workers, lr, b1, b2, eps, weight_decay, variance_freeze, variance_steps, sync_steps
    ):
        self.y = p.astype(np.float32).reshape(-1)
        self.p = [self.y] * workers
        self.m, self.B = ([np.zeros_like(self.y)] * workers for _ in range(2))
        self.v, self.G = np.zeros_like(self.y), 0.0
        self.residuals = zero_residuals(self.y.size, workers)
        self.lr, self.b1, self.b2, self.eps, self.weight_decay = lr, b1, b2, eps, weight_decay
        self.variance_freeze, self.count, self.variance_updates = variance_freeze, 0, 0
        self.variance_steps, self.sync_steps = variance_steps, sync_steps

    def divided(self, x, rates=1.0):
        """`x / (sqrt(v) + eps)`, bounded: 0 where v is 0."""
        u = np.where(self.v > 0, x / (np.sqrt(self.v) + self.eps), 0)
        return bounded(u, 3 * rates, self.variance_updates, self.b2).astype(np.float32)

    def update(self, gradients):
        """Makes one update from the workers' own gradients; every worker's parameters."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        workers, t = len(g), self.count
        self.count += 1
        if t < self.variance_freeze:
            if self.variance_steps(t):
                mean = np.mean(g, axis=0, dtype=np.float32)
                self.v = self.b2 * self.v + (1 - self.b2) * mean**2
                self.variance_updates += 1
            else:
                mean, self.residuals = ec1(g, self.residuals, self.v > 0)
            m = self.b1 * self.m[0] + (1 - self.b1) * mean
            self.m = [m] * workers
            self.y = self.y - self.lr * (self.divided(m) + self.weight_decay * self.y)
            if self.count == self.variance_freeze:
                self.residuals = zero_residuals(self.y.size, workers)
            self.p = [self.y] * workers
            return self.p
        self.m = [self.b1 * m + (1 - self.b1) * x for m, x in zip(self.m, g, strict=True)]
        self.B = [B + self.lr * m for B, m in zip(self.B, self.m, strict=True)]
        self.G += self.lr
        self.y = self.y - self.lr * self.weight_decay * self.y
        if self.sync_steps(t):
            B, self.residuals = ec1(self.B, self.residuals, self.v > 0)
            self.y = self.y - self.divided(B, self.G)
            self.m = [B / self.G] * workers
            self.B, self.G = [np.zeros_like(B)] * workers, 0.0
        self.p = [self.y - self.divided(B, self.G) for B in self.B]
        return self.p


class Tensor:
    """One tensor, the same parameters on every worker, and the momentum of each."""

    def __init__(self, p, workers, lr, weight_decay):
        self.p = p.astype(np.float32).reshape(-1)
        self.m: Any = [np.zeros_like(self.p) for _ in range(workers)]
        self.lr, self.weight_decay, self.count = lr, weight_decay, 0

    def step(self, lr, u):
        """Applies an update with decoupled weight decay."""
        self.p = (self.p - lr * (u + self.weight_decay * self.p)).astype(np.float32)
        self.count += 1
        return self.p


def vote_sign(z, positive):
    """`sgn`, but a zero is +1 where `positive` and -1 elsewhere."""
    return np.where(z == 0, np.float32(1 if positive else -1), np.sign(z)).astype(np.float32)


def sum_of_votes(z, turn):
    """The sum of the workers' signs; zeros count as their index and the turn say."""
    return np.sum([vote_sign(x, (turn + i) % 2 == 0) for i, x in enumerate(z)], axis=0)


class Signum(Tensor):
    """Signum with majority vote."""

    def __init__(self, p, workers, lr, b1, weight_decay):
        super().__init__(p, workers, lr, weight_decay)
        self.b1 = b1

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        self.m = [self.b1 * m + (1 - self.b1) * x for m, x in zip(self.m, g, strict=True)]
        u = vote_sign(sum_of_votes(self.m, self.count), self.count % 2 == 0)
        return self.step(self.lr, u)


class DistributedLion(Tensor):
    """Distributed Lion."""

    def __init__(self, p, workers, lr, b1, b2, weight_decay, aggregation):
        super().__init__(p, workers, lr, weight_decay)
        self.b1, self.b2, self.aggregation = b1, b2, aggregation

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        both = list(zip(self.m, g, strict=True))
        u = sum_of_votes([self.b1 * m + (1 - self.b1) * x for m, x in both], self.count)
        u = vote_sign(u, self.count % 2 == 0) if self.aggregation == "majority" else u / len(g)
        self.m = [self.b2 * m + (1 - self.b2) * x for m, x in both]
        return self.step(self.lr, u)


class EfSignsgd(Tensor):
    """Zheng et al.'s dist-EF-blockSGDM, with residuals of gradients as they write it.

    `lr` is a function of the update count; it must not be 0.
    """

    def __init__(self, p, workers, lr, momentum, weight_decay):
        super().__init__(p, workers, lr, weight_decay)
        self.residuals = zero_residuals(self.p.size, workers)
        self.momentum = momentum

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        lr, ratio = self.lr(self.count), self.lr(max(self.count - 1, 0)) / self.lr(self.count)
        self.m = [self.momentum * m + x for m, x in zip(self.m, g, strict=True)]
        p = [self.momentum * m + x for m, x in zip(self.m, g, strict=True)]
        rescaled = Residuals(*[[ratio * x for x in side] for side in self.residuals])
        mean, self.residuals = ec1(p, rescaled, kind="mean_abs")
        return self.step(lr, mean)


class GeoMesh:
    """GeoMesh's outer loop on one tensor; ties and zeros take turns."""

    def __init__(self, x, lr=0.3, momentum=0.9):
        self.x, self.u = x.astype(np.float32), np.zeros_like(x, np.float32)
        self.lr, self.momentum, self.count = lr, momentum, 0

    def exchange(self, own, weights):
        """The shared parameters after the vote on the workers' own ones."""
        D = [self.x - x_i for x_i in own]
        signs = [vote_sign(d, (self.count + i) % 2 == 0) for i, d in enumerate(D)]
        v = vote_sign(np.tensordot(weights, signs, 1), self.count % 2 == 0)
        D = np.float32(np.mean([np.mean(np.abs(d)) for d in D])) * v
        self.u = self.momentum * self.u + D
        self.x = self.x - self.lr * (D + self.momentum * self.u)
        self.count += 1
        return self.x


def hash_words(counter, key):
    """32 bits for each counter: two rounds of multiplication, a word of the key before each."""
    x = np.asarray(counter, np.uint32) ^ key[0]
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x ^= key[1]
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def uniforms(key, size, workers, first=0):
    """A number in (-1, 1) for each element: half a word, shared with the element 4 bits on."""
    length = -(-size // (8 * workers))
    chunk, rest = np.divmod(np.arange(size), 8 * max(length, 1))
    bit, byte = np.divmod(rest, max(length, 1))
    words = hash_words(first + (4 * chunk + bit % 4) * length + byte, np.asarray(key, np.uint32))
    halves = (words >> (16 * (bit // 4)).astype(np.uint32)) & np.uint32(0xFFFF)
    return (2 * halves.astype(np.float64) + 1) / 2**16 - 1


def binarize(z, uniform):
    """`Q(z)`, drawn by a uniform number in (-1, 1)."""
    return np.where(uniform < z, 1.0, -1.0)


class Birder(Tensor):
    """Birder."""

    def __init__(self, p, workers, lr, b, weight_decay=0.0):
        super().__init__(p, workers, lr, weight_decay)
        self.m, self.a = (np.zeros((workers, self.p.size), np.float32) for _ in range(2))
        self.active = np.zeros(self.p.size, bool)
        self.b = b

    def update(self, gradients, own_uniforms, server_uniforms):
        """Makes one update from the workers' own gradients and everybody's random numbers."""
        g = np.stack([x.astype(np.float32).reshape(-1) for x in gradients])
        seen = self.active | np.any(g != 0, axis=0)
        if self.count == 0:
            self.active = seen
        self.m = self.b * self.m + (1 - self.b) * g
        self.a = self.b * self.a + (1 - self.b) * np.abs(g)
        z = np.where(self.a > 0, self.m / np.where(self.a > 0, self.a, 1), 0)
        u = binarize(np.mean(binarize(z, own_uniforms), axis=0), server_uniforms)
        u = np.where(self.active, u, 0)
        self.active = seen
        return self.step(self.lr, u)


def quantized_layout(shapes, workers, bits, large=2**16):
    """Where the exchange at 2, 4 and 8 bits has each value: section 10 of the algorithms.

    Tensors of more than `large` elements, and of so many that padding makes them longer by 1/16 at
    most, are parts; the others are one part, end to end. A part is padded to `workers` chunks, each
    of blocks of 256 values, as many as make whole bytes of blocks.

    Returns:
      For each part the place of each of its values among all values, end to end, `[workers,
      blocks, 256]`; -1 where it is padded.
    """
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    whole = workers * 256 * (8 // bits)
    places = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    is_large = [size > max(large, 16 * whole) for size in sizes]
    parts = [x for x, alone in zip(places, is_large, strict=True) if alone]
    small = [x for x, alone in zip(places, is_large, strict=True) if not alone]
    parts.append(np.concatenate([np.zeros(0, int), *small]))
    return [
        np.pad(x, (0, -x.size % whole), constant_values=-1).reshape(workers, -1, 256)
        for x in parts
        if x.size
    ]


def dither(s, call=0, worker=0, server=False):
    """Numbers in [0, 1), float64 ``[..., 256]``, of blocks with these scales ``[..., 1]``."""
    golden, low = np.uint64(0x9E3779B9), np.uint64(2**32 - 1)
    h = (s.view(np.uint32) >> 8).astype(np.uint64) * golden & low
    h = (h ^ h >> np.uint64(15)) * np.uint64(0x85EBCA6B) & low
    places = np.arange(256, dtype=np.uint64) * golden & low
    of_calls, of_workers = (0x91E10DA5, 0xC13FA9A9) if server else (0xC13FA9A9, 0x91E10DA5)
    offset = np.uint64(call * of_calls) + np.asarray(worker, np.uint64) * np.uint64(of_workers)
    return ((h ^ h >> np.uint64(13)) + offset + places & low) // 2**9 / 2**23


def to_powers(c, s, levels, call=0, worker=0, server=False):
    """Values ``[..., 256]``, each rounded to one of the two powers of two beside it, or to 0."""
    share, u = np.abs(c) * (np.float32(1) / s), dither(s, call, worker, server)
    mantissa, exponent = np.frexp(share)
    least = 2.0 ** (1 - levels)
    # Half of what `frexp` calls the mantissa is the power below.
    power = np.exp2(exponent - 1.0) * np.where(u + (2 * mantissa - 1) >= 1, 2, 1)
    rounded = np.where(share < least, np.where(u * least < share, least, 0), np.minimum(power, 1))
    return (np.sign(c) * rounded).astype(np.float32) * s


def quantized_means(values, bits, layout=None, residual_decay=1.0, feedback=True, numbers=None):
    """The mean at 2, 4 or 8 bits, call after call: section 10 of the algorithms.

    Args:
      values: float32 ``[calls, workers, elements]``, of all tensors end to end.
      bits: per value.
      layout: from :func:`quantized_layout`; by default of one tensor.
      residual_decay: what residuals are multiplied with.
      feedback: whether rounding errors are added later. Without it levels are spaced as squares at
        8 bits, and powers of two at fewer.
      numbers: of the calls, for the random rounding to powers of two.

    Returns:
      The means, a list; and after the last call the workers' residuals, ``[workers, elements]``,
      and the servers', each in the place of its value, ``[elements]``.
    """
    _, workers, elements = values.shape
    levels = np.float32(2 ** (bits - 1) - 1)
    if layout is None:
        layout = quantized_layout([(elements,)], workers, bits)

    def compress(c, number, server=False):
        s = np.maximum(np.abs(c).max(-1, keepdims=True), np.float32(2.0**-117))
        if not feedback and bits < 8:
            which: Any = np.arange(len(c)).reshape(-1, *[1] * (c.ndim - 1))
            return to_powers(c, s, levels, number, which, server)
        if not feedback:
            r = np.sign(c) * np.round(levels * np.sqrt(np.abs(c) / s))
            return r * np.abs(r) * (s / levels**2)
        return np.round(c * (levels / s)) * (s / levels)

    e = [np.zeros((workers, *part.shape), np.float32) for part in layout]
    E = [np.zeros(part.shape, np.float32) for part in layout]
    means = []
    for number, call in zip(numbers or range(len(values)), values, strict=True):
        mean = np.zeros(elements, np.float32)
        for i, part in enumerate(layout):
            z = np.where(part >= 0, call[:, part], np.float32(0))
            c = z + np.float32(residual_decay * feedback) * e[i]
            sent = compress(c, number)
            e[i] = c - sent
            a = sent.mean(0) + np.float32(residual_decay * feedback) * E[i]
            answer = compress(a, number, server=True)
            E[i] = a - answer
            mean[part[part >= 0]] = answer[part >= 0]
        means.append(mean)

    def in_place(parts):
        flat = np.zeros((*parts[0].shape[:-3], elements), np.float32) if parts else np.zeros(0)
        for part, x in zip(layout, parts, strict=True):
            flat[..., part[part >= 0]] = x[..., part >= 0]
        return flat

    return means, in_place(e), in_place(E)


def drive_means(values, layout, keys, server_keys, unbiased=True):
    """The mean by DRIVE, in blocks of 256 values.

    Args:
      values: float32 ``[workers, elements]``.
      layout: from :func:`quantized_layout` for one bit.
      keys: each worker's words, ``[workers, 2]``.
      server_keys: each server's, likewise.
      unbiased: whether the scale is that of unbiased decoding.
    """
    H = np.ones((1, 1))
    while len(H) < 256:
        H = np.kron(H, [[1, 1], [1, -1]])
    rows = np.cumsum([0, *(part.shape[1] // 8 for part in layout)])

    def decoded(x, D):
        """`x` after the way there and back; ``[blocks, 256]``."""
        y = (x * D) @ H / 16
        norm = np.abs(y).sum(-1, keepdims=True)
        s = (y**2).sum(-1, keepdims=True) / np.maximum(norm, 1e-30) if unbiased else norm / 256
        return (s * sgn(y)) @ H / 16 * D

    mean = np.zeros(values.shape[1], np.float32)
    for first, part in zip(rows, layout, strict=False):
        for chunk, places in enumerate(part):
            planes, own = np.meshgrid(np.arange(8), np.arange(len(places) // 8), indexing="ij")
            block = ((8 * chunk + planes) * rows[-1] + first + own).reshape(-1, 1)
            words = (8 * block + np.arange(8)).astype(np.uint32)

            def signs(key, words=words):
                bits = hash_words(words, key)[..., None] >> np.arange(32, dtype=np.uint32)
                return np.where(bits & np.uint32(1), -1.0, 1.0).reshape(-1, 256)

            x = np.where(places >= 0, values[:, places], 0)
            total = np.mean([decoded(z, signs(key)) for z, key in zip(x, keys, strict=True)], 0)
            total = decoded(total, signs(server_keys[chunk]))
            mean[places[places >= 0]] = total[places >= 0]
    return mean


def largest_values_means(values, share, every, decay=1.0):
    """The mean of the values above a threshold, call after call: section 17 of the algorithms.

    Args:
      values: float32 ``[calls, workers, d]``.
      share: of the values that have room.
      every: calls between two renewals of the threshold.
      decay: what residuals are multiplied with.

    Returns:
      The means, a list, and the residuals after the last call, ``[workers, d]``.
    """
    calls, workers, d = values.shape
    room, e, tau = int(np.ceil(share * d)), np.zeros((workers, d), np.float32), [0.0] * workers
    means = []
    for t in range(calls):
        sent = np.zeros_like(e)
        start = t % every * 2654435769 % 2**32 % d
        for i in range(workers):
            c = values[t, i] + np.float32(decay) * e[i]
            if t % every == 0:
                tau[i] = np.sort(np.abs(c))[-room]
            order = np.roll(np.arange(d), -start)
            passing = [k for k in order if abs(c[k]) >= tau[i] and c[k] != 0]
            sent[i, passing[:room]] = c[passing[:room]]
            e[i] = c - sent[i]
        means.append(sent.mean(0))
    return means, e


class FetchSgd:
    """FetchSGD on one vector, by the published code; `hashed` has each row's columns and signs."""

    def __init__(self, p, lr, momentum, columns, kept, hashed):
        self.p, self.lr, self.momentum, self.kept = p.astype(np.float32), lr, momentum, kept
        self.hashed = [(np.asarray(h), np.asarray(sign)) for h, sign in hashed]
        self.u, self.v = (np.zeros((len(self.hashed), columns), np.float32) for _ in range(2))

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        self.u = self.momentum * self.u
        for g in gradients:
            for row, (h, sign) in zip(self.u, self.hashed, strict=True):
                np.add.at(row, h, sign * g / len(gradients))
        self.v = self.v + self.lr * self.u
        read = [sign * row[h] for row, (h, sign) in zip(self.v, self.hashed, strict=True)]
        estimates = np.median(read, 0)
        places = np.argsort(-np.abs(estimates), kind="stable")[: self.kept]
        self.p[places] -= estimates[places]
        for table in (self.u, self.v):
            for row, (h, _) in zip(table, self.hashed, strict=True):
                row[h[places]] = 0
        return self.p


class Cada(Tensor):
    """CADA before SGD, on one tensor; `synced` says which updates had an exchange."""

    def __init__(self, p, workers, lr, c, delay):
        super().__init__(p, workers, lr, 0.0)
        self.c, self.delay, self.due, self.age = c, delay, True, 0
        self.path, self.synced = [self.p], []

    def update(self, gradients):
        """Makes one update from the workers' own gradients."""
        g = [x.astype(np.float32).reshape(-1) for x in gradients]
        if self.due:
            self.sent, self.age = g, -1
        self.synced.append(self.due)
        self.age += 1
        steps = np.square(np.diff(self.path[-self.delay - 1 :], axis=0)).sum()
        changed = max(np.square(x - y).sum() for x, y in zip(g, self.sent, strict=True))
        self.due = changed > self.c / self.delay * steps or self.age + 1 >= self.delay
        self.path.append(self.step(self.lr, np.mean(self.sent, 0)))
        return self.p
