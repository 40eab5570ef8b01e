"""1-bit LAMB in plain NumPy, ours and the paper's: see `tests/reference.py`."""

import numpy as np

from tests.reference import Hierarchy, OnebitAdam, ec1, scale, zero_residuals


class OnebitLamb(OnebitAdam):
    """1-bit LAMB on one tensor: 1-bit Adam whose steps are as long as LAMB's.

    `weight_decay` may be set before any update.
    """

    def __init__(self, p, workers, *, min_coeff, max_coeff, **options):
        super().__init__(p, workers, weight_decay=0.0, bias_correction=True, **options)
        self.bounds, self.running = (min_coeff, max_coeff), 0.0

    def step(self, u):
        """LAMB's step in warm-up; after it one with the running coefficient."""
        u = u + self.weight_decay * self.p
        c = self.running or 1.0
        if self.count <= self.warmup:
            defined = norm(self.p) > 0 and norm(u) > 0
            c = np.clip(norm(self.p) / norm(u), *self.bounds) if defined else 1.0
            if c != 1:
                last = self.running or c
                self.running = 0.9 * last + 0.1 * c
        return self.lr * c * u


class OnebitLambPublished:
    """The paper's 1-bit LAMB on a list of tensors, the same parameters on every worker.

    `weight_decays`, one for each tensor, may be set before any update.
    """

    def __init__(
        self, params, workers, lr, b1, b2, eps, warmup, kind="rms", per_node=None, **bounds
    ):
        self.p = [p.astype(np.float32).reshape(-1) for p in params]
        self.m = [np.zeros_like(p) for p in self.p]
        self.v = [np.zeros_like(p) for p in self.p]
        self.fresh, self.active = [], []
        size = sum(p.size for p in self.p)
        self.residuals = zero_residuals(size, workers)
        self.hierarchy = per_node and Hierarchy(size, workers // per_node, per_node)
        self.coefficients = np.zeros(len(self.p), np.float32)
        self.ratios = np.ones(len(self.p), np.float32)
        self.momentum_scales = np.ones(len(self.p), np.float32)
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.weight_decays = [0.0 for _ in self.p]
        self.warmup, self.count = warmup, 0
        self.coeff_beta, self.ratio_threshold = bounds["coeff_beta"], bounds["ratio_threshold"]
        self.coeff_bounds = bounds["min_coeff"], bounds["max_coeff"]
        self.ratio_bounds = bounds["min_ratio"], bounds["max_ratio"]
        self.kind = kind

    def update(self, gradients):
        """Makes one update from a list of gradients for each worker."""
        g = [[x.astype(np.float32).reshape(-1) for x in own] for own in gradients]
        if self.count < self.warmup:
            self.dense(g)
        else:
            self.compressed(g)
        self.count += 1
        return self.p

    def dense(self, g):
        for i, p in enumerate(self.p):
            mean = np.mean([own[i] for own in g], axis=0, dtype=np.float32)
            self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * mean
            self.v[i] = self.b2 * self.v[i] + (1 - self.b2) * mean**2
            u = self.m[i] / (np.sqrt(self.v[i]) + self.eps) + self.weight_decays[i] * p
            c = 1.0
            if norm(p) > 0 and norm(u) > 0:
                c = np.clip(norm(p) / norm(u), *self.coeff_bounds)
            if c != 1:
                old = self.coefficients[i]
                self.coefficients[i] = self.coeff_beta * old + (1 - self.coeff_beta) * c
            self.p[i] = (p - self.lr * c * u).astype(np.float32)

    def compressed(self, g):
        if not self.fresh:
            self.active, self.fresh = [v > 0 for v in self.v], [v.copy() for v in self.v]
            sigma = [scale(m[on]) for m, on in zip(self.m, self.active, strict=True)]
            moving = [s for s in sigma if s > 0]
            for i, s in enumerate(sigma):
                self.momentum_scales[i] = np.mean(moving) / s if s > 0 else 1
        own_m = [
            [self.b1 * m + (1 - self.b1) * x for m, x in zip(self.m, own, strict=True)] for own in g
        ]
        fused = [
            np.concatenate([k * x for k, x in zip(self.momentum_scales, own, strict=True)])
            for own in own_m
        ]
        active = np.concatenate(self.active)
        if self.hierarchy:
            F = self.hierarchy.all_reduce(fused, active, self.kind)
        else:
            F, self.residuals = ec1(fused, self.residuals, active, self.kind)
        ends = np.cumsum([p.size for p in self.p])[:-1]
        for i, F_l in enumerate(np.split(F, ends)):
            m, before = F_l / self.momentum_scales[i], self.m[i]
            gradient = (m - self.b1 * before) / (1 - self.b1)
            self.m[i] = m
            self.fresh[i] = self.b2 * self.fresh[i] + (1 - self.b2) * gradient**2
            root = np.sqrt(self.v[i]) + self.eps
            q = np.where(self.active[i], m / root, 0)
            u = q + self.weight_decays[i] * self.p[i]
            f = 1.0
            if self.active[i].any():
                f = np.max((root / (np.sqrt(self.fresh[i]) + self.eps))[self.active[i]])
            if self.weight_decays[i] > 0 and norm(u) > 0:
                w = min(1.0, norm(q) / norm(u))
                f = f * w + 1 - w
            r = self.ratios[i]
            f = np.clip(f, *self.ratio_bounds)
            f = np.clip(f, r * (1 - self.ratio_threshold), r * (1 + self.ratio_threshold))
            self.ratios[i] = f
            coefficient = self.coefficients[i] if self.coefficients[i] > 0 else 1
            self.p[i] = (self.p[i] - self.lr * coefficient * f * u).astype(np.float32)


def norm(x):
    return np.sqrt(np.sum(x.astype(np.float64) ** 2))
