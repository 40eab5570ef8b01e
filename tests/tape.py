"""Records what every optimizer does on a fixed tape of gradients, so that it can be held to it.

    python -m tests.tape

writes `tests/data/tape.npz`: of each optimizer of `tests.optimizers`, flat and over nodes, 40
updates over their phase changes: the phase of each, parameters after every fifth, momenta and
residuals at the end, and the bytes that an update of each phase sends. `tests/test_tape.py`
compares. It was recorded from commit 96998af, before the library was written anew, and holds the
arrays of then wherever the new library gives them. Recorded again, since they differ by intention:

- two nodes, which had no servers by default: of that commit with `form="two-stage"`;
- fewer bytes of Birder and of `LargestValues` over nodes, whose shards are cut with less padding;
- `LargestValues`: 70 % of 298 values, where padding made it 300;
- `onebit_lamb_published`, whose steps had a bound that the paper's have not; without it the arrays
  were equal;
- the phase of `mean_gradients`, which has a state now.

Record it again only for a change of what is computed.
"""

import functools
import pathlib
from typing import Any

import jax
import numpy as np
import optax
from jax import lax

from onebit_jax import wire
from tests import views
from tests.optimizers import OPTIMIZERS
from tests.runs import Sizes, axis_of
from tests.workers import make_mesh, on_workers, replicate

PATH = pathlib.Path(__file__).parent / "data" / "tape.npz"
UPDATES = 40
FLAT, NODES = 4, (2, 2)
# In rows with and without padding; a kernel that is cut flat; fewer elements than workers.
SHAPES = {"even": (32, 3), "kernel": (3, 3, 4), "rows": (19, 8), "short": (3,), "vector": (11,)}


def params() -> Any:
    """Of every shape, with a row that never has a gradient."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(workers: int) -> Any:
    """Of all updates and workers, `[updates, workers, ...]`: drifting means with noise."""
    rng = np.random.default_rng(1)

    def of_tensor(shape: tuple[int, ...]) -> np.ndarray:
        mean = rng.standard_normal((1, 1, *shape)) * rng.uniform(0.1, 2, (UPDATES, 1, *shape))
        return (mean + rng.standard_normal((UPDATES, workers, *shape))).astype(np.float32)

    grads = {name: of_tensor(shape) for name, shape in SHAPES.items()}
    grads["rows"][..., 4, :] = 0
    return grads


def sizes_of(name: str) -> list[Sizes]:
    """The numbers of workers that an optimizer is recorded for."""
    return [FLAT, NODES] if OPTIMIZERS[name].has_nodes else [FLAT]


def run(name: str, sizes: Sizes) -> dict[str, np.ndarray]:
    """Parameters and phases of a run, and what is left in its state."""
    tx = optax.with_extra_args_support(OPTIMIZERS[name].make(axis_of(sizes)))

    def train(params: Any, state: Any, grads: Any) -> Any:
        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, views.phase(state))

        (_, state), history = lax.scan(step, (params, state), grads)
        return state, history

    start = replicate(params(), 4)
    state = on_workers(tx.init, sizes)(start)
    grads = jax.tree.map(lambda g: g.swapaxes(0, 1), gradients(4))
    state, (history, phases) = jax.device_get(on_workers(train, sizes)(start, state, grads))
    found = {f"params/{leaf}": x[0, 4::5] for leaf, x in history.items()}
    for i, x in enumerate(views.carried(tx, state, params(), sizes)):
        found[f"carried/{i}"] = x
    return found | {"phases": phases[0]}


def bytes_by_phase(name: str, sizes: Sizes, phases: np.ndarray) -> dict[str, np.ndarray]:
    """The bytes that a worker sends in an update of each of these phases."""
    axes = axis_of(sizes)
    names, shape = ((axes,), (sizes,)) if isinstance(axes, str) else (axes, sizes)
    mesh = make_mesh(shape, names)
    tx = optax.with_extra_args_support(OPTIMIZERS[name].make(axes))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), params())
    state = jax.eval_shape(on_workers(tx.init, sizes), like)
    sent = {}
    for phase in sorted({views.phase_name(i) for i in phases if i >= 0}) or [None]:
        update = functools.partial(tx.update, **({"phase": phase} if phase else {}))
        lowered = on_workers(update, sizes, "shard_map").lower(like, state, like)
        sent[f"bytes/{phase}"] = np.asarray(wire.bytes_sent(wire.collectives(lowered, mesh)))
    return sent


def main() -> None:
    """Records all."""
    tape = {}
    for name in OPTIMIZERS:
        for sizes in sizes_of(name):
            found = run(name, sizes)
            found |= bytes_by_phase(name, sizes, found["phases"])
            kind = "flat" if sizes == FLAT else "nodes"
            tape |= {f"{name}/{kind}/{key}": x for key, x in found.items()}
            print(name, kind, sorted(set(found["phases"].tolist())))
    np.savez_compressed(PATH, **tape)
    print(f"wrote {PATH}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
