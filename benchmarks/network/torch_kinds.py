"""What is timed in PyTorch: DistributedDataParallel with Adam, and DeepSpeed's compressed exchange.

DistributedDataParallel (DDP) is timed from the moment its bucket is full on all hosts to the end of
Adam's step: neither a backward pass nor the copy of its gradients into the bucket counts. There is
one bucket, as PowerSGD hangs on Gloo with several. DeepSpeed's `compressed_allreduce` is timed
alone, without an optimizer.
"""

import datetime
import importlib
import math
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.network.processes import Place

_POWER_SGD_RANK = 4


class Kind(NamedTuple):
    """One line of the table.

    Attributes:
      make: from a worker to a function that makes one step and returns seconds.
      warmup: steps until every later one is like the others.
    """

    make: Callable[["Worker"], Callable[[], float]]
    warmup: int = 1


def _hooks(name: str) -> Any:
    return importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{name}")


class Worker:
    """Times the kinds on one host, together with those on the others."""

    def __init__(self, place: Place):
        self.torch: Any = importlib.import_module("torch")
        self.hosts = place.hosts
        address, port = place.meeting_point
        self.torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=place.rank,
            world_size=place.hosts,
            timeout=datetime.timedelta(hours=1),  # the parent's limit is the one that counts
        )
        # The hosts share the cores, and threads that wait for one another would keep them busy.
        self.torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.hosts))
        rng = np.random.default_rng(place.rank)
        self.grads = [
            self.torch.from_numpy(np.float32(1e-3) * rng.standard_normal(shape, np.float32))
            for shape in place.shapes
        ]
        self.release()

    def prepare(self, kind: str) -> None:
        """Makes what is timed."""
        self._step = KINDS[kind].make(self)
        self._warmup = KINDS[kind].warmup

    def warm_up(self) -> None:
        """Makes the steps that are not like the later ones."""
        for _ in range(self._warmup):
            self.step()

    def step(self) -> float:
        """Makes one step; seconds."""
        assert self._step is not None
        return self._step()

    def release(self) -> None:
        """Frees what `prepare` made."""
        self._step: Callable[[], float] | None = None


def _ddp(worker: Worker, hook: Callable[[Any, Any], Any], state: Any) -> Callable[[], float]:
    torch, grads = worker.torch, worker.grads

    class Loss(torch.autograd.Function):
        """A loss that costs nothing and whose gradients are there already."""

        @staticmethod
        def forward(ctx: Any, *params: Any) -> Any:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return tuple(grads)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = torch.nn.ParameterList([torch.full_like(g, 0.5) for g in grads])

        def forward(self) -> Any:
            return Loss.apply(*self.params)

    model = torch.nn.parallel.DistributedDataParallel(
        Model(), bucket_cap_mb=2**20, gradient_as_bucket_view=True
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    starts: list[float] = []

    def timed(state: Any, bucket: Any) -> Any:
        torch.distributed.barrier()
        starts.append(time.perf_counter())
        return hook(state, bucket)

    timed.__annotations__ = {"bucket": torch.distributed.GradBucket}
    model.register_comm_hook(state, timed)

    def step() -> float:
        starts.clear()
        adam.zero_grad()
        model().backward()
        adam.step()
        end = time.perf_counter()
        [start] = starts
        return end - start

    return step


def _power_sgd(worker: Worker) -> Callable[[], float]:
    power_sgd = _hooks("powerSGD_hook")
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=_POWER_SGD_RANK, start_powerSGD_iter=2
    )
    return _ddp(worker, power_sgd.powerSGD_hook, state)


def _deepspeed(worker: Worker) -> Callable[[], float]:
    torch = worker.torch
    sys.modules.setdefault("cupy", _numpy_as_cupy())
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed(dist_backend="gloo")
    nccl = importlib.import_module("deepspeed.runtime.comm.nccl")
    nccl.CupyBackend.torch2cupy = lambda self, tensor: tensor.numpy()
    nccl.CupyBackend.cupy2torch = lambda self, array: torch.from_numpy(array)
    # Gloo wants a scale of the shape of what receives it, [1].
    vars(nccl)["dist"] = types.SimpleNamespace(
        **{name: getattr(comm, name) for name in _COMM if name != "all_gather"},
        all_gather=lambda into, x, group: comm.all_gather(into, x.reshape(-1), group=group),
    )
    backend = nccl.NcclBackend()
    # Every host serves whole bytes of signs.
    unit = 8 * worker.hosts
    elements = math.ceil(sum(g.numel() for g in worker.grads) / unit) * unit
    momentum = torch.zeros(elements)
    flat = torch.cat([g.flatten() for g in worker.grads])
    residual, server_residual = torch.zeros(elements), torch.zeros(elements // worker.hosts)

    def step() -> float:
        momentum[: flat.numel()] = flat
        torch.distributed.barrier()
        start = time.perf_counter()
        backend.compressed_allreduce(momentum, residual, server_residual, 0)
        return time.perf_counter() - start

    return step


_COMM = ("new_group", "get_rank", "get_world_size", "all_to_all_single")


def _numpy_as_cupy() -> types.ModuleType:
    """As much of cupy as DeepSpeed's exchange calls, on the CPU."""
    cupy = types.ModuleType("cupy")
    for name in ("packbits", "unpackbits", "split", "zeros"):
        setattr(cupy, name, getattr(np, name))
    vars(cupy)["cuda"] = types.SimpleNamespace(
        Device=lambda index: types.SimpleNamespace(use=lambda: None),
        get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
    )
    return cupy


KINDS = {
    "DDP, float32": Kind(lambda x: _ddp(x, _hooks("default_hooks").allreduce_hook, None)),
    "DDP, float16": Kind(lambda x: _ddp(x, _hooks("default_hooks").fp16_compress_hook, None)),
    # Its first two steps are dense, the third makes its matrices.
    f"DDP, PowerSGD of rank {_POWER_SGD_RANK}": Kind(_power_sgd, warmup=4),
    "DeepSpeed, exchange alone": Kind(_deepspeed),
}
