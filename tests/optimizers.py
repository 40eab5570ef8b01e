"""The one table of the library's optimizers, for every test that holds for all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import onebit_jax
from onebit_jax import contrib

WARMUP, LEARNING_RATE = 3, 1e-2
# Of Optax's own Adam: its usual one is 0 in float16.
EPS = 1e-4
RATE = optax.linear_schedule(LEARNING_RATE, 0.0, 50)
# Of 1-bit Adam: a warm-up that is Adam's to the last bits, after which the variance stays.
FROZEN: dict[str, Any] = {"warmup_bits": 32, "variance_refreshes": None}


class Optimizer(NamedTuple):
    """How tests make an optimizer, such that a few steps show all that it does.

    Attributes:
      make: of an axis name, and a learning rate or schedule, the optimizer.
      has_warmup: its first `WARMUP` updates are dense.
      is_local: workers' parameters differ between two of its exchanges.
      has_nodes: it takes two axes, and then compresses between nodes alone.
      has_residuals: it keeps errors of its exchange, which belong to a number of workers.
      has_float16: it takes vectors in float16; what Optax's Muon does with them divides by 0.
      needs_params: an update must be given the parameters.
    """

    make: Callable[..., optax.GradientTransformation]
    has_warmup: bool = False
    is_local: bool = False
    has_nodes: bool = True
    has_residuals: bool = True
    has_float16: bool = True
    needs_params: bool = True


def _dense(axis_name: Any, rate: Any = RATE) -> optax.GradientTransformation:
    return optax.chain(onebit_jax.mean_gradients(axis_name), optax.adamw(rate, eps=EPS))


def _compressed_sgd(**how: Any) -> Callable[..., optax.GradientTransformation]:
    return lambda axis_name, rate=RATE: optax.chain(
        onebit_jax.per_worker(optax.trace(0.9)),
        onebit_jax.compressed_mean(axis_name, **how),
        optax.scale_by_learning_rate(rate),
    )


def _local_adam(**how: Any) -> Callable[..., optax.GradientTransformation]:
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return lambda axis_name, rate=RATE: onebit_jax.local_steps(
        optax.adam(rate, eps=EPS), outer, axis_name=axis_name, bits=4, fragments=2, **how
    )


def _cada_adam(axis_name: Any, rate: Any = RATE) -> optax.GradientTransformation:
    return optax.chain(contrib.cada(axis_name, delay=3), optax.adam(rate, eps=EPS))


def _geomesh(axis_name: Any, rate: Any = RATE) -> optax.GradientTransformation:
    outer = optax.sgd(0.3, momentum=0.9, nesterov=True)
    vote = contrib.MajorityVote()
    return onebit_jax.local_steps(
        optax.lion(rate), outer, every=4, axis_name=axis_name, compressor=vote
    )


def _made_by(
    constructor: Callable[..., optax.GradientTransformation], **options: Any
) -> Callable[..., optax.GradientTransformation]:
    return lambda axis_name, rate=RATE: constructor(rate, axis_name=axis_name, **options)


def matrices(params: Any) -> Any:
    """The matrices that Muon takes; Optax's divides by the size of a matrix."""
    return jax.tree.map(lambda p: p.ndim == 2 and p.size > 0, params)


def _muon(axis_name: Any, rate: Any = RATE) -> optax.GradientTransformation:
    return onebit_jax.onebit_muon(
        rate, axis_name=axis_name, matrices=matrices, adam_learning_rate=rate
    )


OPTIMIZERS: dict[str, Optimizer] = {
    "mean_gradients": Optimizer(_dense, has_residuals=False),
    "onebit_adam": Optimizer(
        _made_by(onebit_jax.onebit_adam, b2=0.5, warmup=WARMUP, weight_decay=0.01, **FROZEN),
        has_warmup=True,
    ),
    # At 4 bits a last bit of a gradient may decide between two powers of two.
    "onebit_adam, refreshed": Optimizer(
        _made_by(onebit_jax.onebit_adam, warmup=WARMUP, warmup_bits=8, variance_refreshes=3),
        has_warmup=True,
    ),
    "onebit_lamb": Optimizer(
        _made_by(onebit_jax.onebit_lamb, warmup=WARMUP, variance_refreshes=4), has_warmup=True
    ),
    "onebit_lamb_published": Optimizer(
        _made_by(contrib.onebit_lamb_published, warmup=WARMUP), has_warmup=True
    ),
    "zero_one_adam": Optimizer(
        _made_by(
            onebit_jax.zero_one_adam,
            b2=0.5,
            variance_freeze=WARMUP,
            variance_steps=lambda t: (t % 2 == 0) & (t < WARMUP),
            sync_steps=lambda t: t % 3 == 2,
        ),
        is_local=True,
    ),
    "birder": Optimizer(_made_by(onebit_jax.birder, seed=0), has_residuals=False),
    "signum": Optimizer(_made_by(onebit_jax.signum), has_nodes=False, has_residuals=False),
    "distributed_lion": Optimizer(
        _made_by(onebit_jax.distributed_lion, aggregation="mean"),
        has_nodes=False,
        has_residuals=False,
    ),
    "ef_signsgd": Optimizer(_made_by(onebit_jax.ef_signsgd, weight_decay=0.1)),
    "onebit_muon": Optimizer(_muon, has_float16=False),
    "compressed_mean": Optimizer(_compressed_sgd(bits=1), needs_params=False),
    "compressed_mean, 4 bits": Optimizer(_compressed_sgd(bits=4), needs_params=False),
    "local_steps": Optimizer(_local_adam(every=4), is_local=True),
    "local_steps, streaming": Optimizer(_local_adam(every=2, delay=1), is_local=True),
    "compressed_mean, drive": Optimizer(
        _compressed_sgd(compressor=contrib.Drive()), has_residuals=False, needs_params=False
    ),
    "compressed_mean, largest": Optimizer(
        _compressed_sgd(compressor=contrib.LargestValues(0.7, every=4)), needs_params=False
    ),
    "fetch_sgd": Optimizer(
        _made_by(contrib.fetch_sgd, compression=0.2, share=0.5),
        has_nodes=False,
        has_residuals=False,
        needs_params=False,
    ),
    "cada": Optimizer(_cada_adam, has_nodes=False, has_residuals=False),
    "geomesh": Optimizer(_geomesh, is_local=True, has_residuals=False),
}
WITH_NODES = [name for name, optimizer in OPTIMIZERS.items() if optimizer.has_nodes]
