"""The steps of `benchmarks.overlap` in PyTorch, whose DDP overlaps its buckets too."""

import time

from benchmarks.network.processes import Place
from benchmarks.network.torch_kinds import hooks, joined

KINDS = ("PyTorch compute", "DDP, float32", "DDP, float16")
_HOOKS = {"DDP, float32": "allreduce_hook", "DDP, float16": "fp16_compress_hook"}
_RATE = 1e-4


class Worker:
    """Makes the steps on one host, together with those on the others."""

    def __init__(self, place: Place):
        self._torch = joined(place)

    def prepare(self, name: str, layers: int, width: int, rows: int) -> None:
        """Makes the model, the optimizer and the batch, and makes some steps."""
        torch = self._torch
        torch.manual_seed(0)
        chain = [
            layer
            for _ in range(layers)
            for layer in (torch.nn.Linear(width, width, bias=False), torch.nn.Tanh())
        ]
        self._model = torch.nn.Sequential(*chain)
        with torch.no_grad():
            for weight in self._model.parameters():
                weight.normal_(std=width**-0.5)
        if name in _HOOKS:
            # Buckets of the default size, 25 MB.
            self._model = torch.nn.parallel.DistributedDataParallel(
                self._model, gradient_as_bucket_view=True
            )
            self._model.register_comm_hook(None, getattr(hooks("default_hooks"), _HOOKS[name]))
        self._adam = torch.optim.Adam(self._model.parameters(), lr=_RATE, fused=True)
        self._batch = torch.randn(rows, width)
        for _ in range(3):  # DDP makes its buckets anew after the first
            self.step()

    def step(self) -> float:
        """Makes one step; seconds."""
        start = time.perf_counter()
        self._adam.zero_grad()
        (self._model(self._batch) - 0.5).square().mean().backward()
        self._adam.step()
        return time.perf_counter() - start

    def release(self) -> None:
        """Frees everything."""
        del self._model, self._adam, self._batch
