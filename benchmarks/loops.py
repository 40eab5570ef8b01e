"""The loops that kinds are run in, compiled for a mesh."""

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import tasks
from benchmarks.kinds import AXIS, Kind
from benchmarks.tasks import Task
from onebit_jax.transforms.algorithm import PHASES, Phase

Gradients = Callable[[Any, Any], tuple[Any, optax.Updates]]


def make_mesh(workers: int) -> Mesh:
    """A mesh of the first devices, one for each worker."""
    return jax.make_mesh((workers,), (AXIS,), devices=jax.devices()[:workers])


def own_loop(
    tx: optax.GradientTransformation, gradients: Gradients, mesh: Mesh, opt_state: optax.OptState
) -> Any:
    """A user's own step: jitted, state and parameters donated, as `train_step`'s to be called.

    Args:
      tx: the optimizer.
      gradients: of parameters and a worker's share of what the step is fed, the loss and the
        gradients.
      mesh: all its devices are workers.
      opt_state: from :func:`onebit_jax.init`, or its shapes.
    """
    axes = mesh.axis_names
    specs = onebit_jax.state_specs(opt_state, axes)
    update = optax.with_extra_args_support(tx).update

    def worker(phase: Phase | None, params: Any, opt_state: Any, feed: Any) -> Any:
        loss, grads = gradients(params, feed)
        updates, opt_state = update(grads, opt_state, params, phase=phase)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, axes)

    @functools.partial(jax.jit, static_argnames="phase", donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, feed: Any, phase: Phase | None = None) -> Any:
        mapped = jax.shard_map(
            functools.partial(worker, phase),
            mesh=mesh,
            in_specs=(P(), specs, P(axes)),
            out_specs=(P(), specs, P()),
            check_vma=False,
        )
        return mapped(params, opt_state, feed)

    return step


def in_memory(params: optax.Params, rows: Any) -> tuple[tuple[()], optax.Updates]:
    """Gradients that are there already, each worker's in a row, and no loss."""
    del params
    return (), jax.tree.map(lambda row: row[0], rows)


class Run:
    """One kind on a task; it holds arrays from `begin` to `end` only.

    Args:
      kind: what to run.
      task: what to train.
      mesh: the devices, along one axis. To compile they need not be there.
      max_skipped: as for `onebit_jax.train_step`.
    """

    def __init__(self, kind: Kind, task: Task, mesh: Mesh, max_skipped: int | None = 10):
        if kind.nodes_of_two:
            mesh = Mesh(mesh.devices.reshape(-1, 2), kind.axes, axis_types=mesh.axis_types * 2)
        tx = kind.make()
        self._kind, self._mesh = kind, mesh
        make_feed = functools.partial(task.make_batch, mesh.size)
        if kind.loop == "bare":
            make_feed = functools.partial(_gradients, mesh.size, task.shapes)
        replicated, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(kind.axes))
        if kind.exchanges:
            make_state = functools.partial(onebit_jax.init, tx, mesh=mesh)
        else:
            make_state = jax.jit(tx.init, out_shardings=replicated)
        state = jax.eval_shape(make_state, task.shapes)

        self._make_params = jax.jit(task.make_params, out_shardings=replicated)
        self._make_feed = jax.jit(make_feed, out_shardings=rows)
        self._init = jax.jit(make_state)
        specs = onebit_jax.state_specs(state, kind.axes)
        self._shapes = (
            _placed(task.shapes, replicated),
            jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), state, specs),
            _placed(jax.eval_shape(make_feed), rows),
        )
        if kind.loop == "train_step":
            self._step = onebit_jax.train_step(task.loss_fn, tx, mesh, max_skipped=max_skipped)
        else:
            gradients = in_memory if kind.loop == "bare" else jax.value_and_grad(task.loss_fn)
            self._step = own_loop(tx, gradients, mesh, state)

    def compile(self) -> jax.stages.Compiled:
        """Compiles all that will run, if it is not yet; the program that is timed, the last."""
        kind = self._kind
        chosen_outside = kind.told or kind.loop == "train_step"
        phases = kind.phases if chosen_outside else (None,)
        # As a call does: JAX compiles anew what was compiled where another mesh is set.
        set_mesh = kind.loop == "train_step"
        context = use_abstract_mesh(self._mesh.abstract_mesh) if set_mesh else nullcontext()
        with context:
            return [self._step.lower(*self._shapes, phase=x).compile() for x in phases][-1]

    def begin(self) -> None:
        """Makes parameters, state, and what the steps are fed."""
        self._params, self._feed = self._make_params(), self._make_feed()
        self._state = self._init(self._params)

    def lead_in(self) -> None:
        """Makes a step of each phase, the last included.

        Raises:
          RuntimeError: the last was not of the phase that is to be timed.
        """
        for phase in self._kind.phases:
            self._advance(phase)
        jax.block_until_ready(self._params)
        expected = self._kind.phases[-1]
        if self._kind.loop == "train_step" and expected is not None:
            made = int(self._metrics["phase"])
            if made != PHASES.index(expected):
                raise RuntimeError(f"the step is in phase {made}, not in that of {expected!r}")

    def turn(self, steps: int) -> float:
        """Makes steps, one after the other; seconds per step."""
        jax.block_until_ready((self._params, self._state))
        start = time.perf_counter()
        for _ in range(steps):
            self._advance(self._kind.phases[-1])
        jax.block_until_ready((self._params, self._state))
        return (time.perf_counter() - start) / steps

    def _advance(self, phase: Phase | None) -> None:
        self._params, self._state, self._metrics = self._step(
            self._params, self._state, self._feed, phase=phase if self._kind.told else None
        )

    def end(self) -> None:
        """Frees what `begin` made."""
        del self._params, self._feed, self._state, self._metrics

    def memory(self) -> dict[str, float]:
        """Bytes per element, on one device; between `begin` and `end`.

        Returns:
          `state`, of live buffers; and of the program that is timed `peak`, at its height;
          `accessed`, by XLA's own account; and `floor`: arguments read once, results written once.
        """
        elements = tasks.size(self._params)
        compiled = self.compile()
        sizes, cost = compiled.memory_analysis(), compiled.cost_analysis()
        assert sizes is not None
        assert cost is not None
        arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
        state = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(self._state))
        return {
            "state": state / elements,
            "peak": peak(sizes) / elements,
            "accessed": cost["bytes accessed"] / elements,
            "floor": (arguments + results) / elements,
        }


def peak(sizes: Any) -> int:
    """Bytes that a program needs at its height, from its memory analysis."""
    arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    return arguments + results - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes


def _gradients(workers: int, shapes: Any) -> Any:
    """Gradients of all workers side by side."""

    def of_tensor(x: jax.ShapeDtypeStruct) -> jax.Array:
        own = tasks.differing(workers).reshape(-1, *[1] * len(x.shape))
        return jnp.broadcast_to(1e-3 * own, (workers, *x.shape)).astype(x.dtype)

    return jax.tree.map(of_tensor, shapes)


def _placed(shapes: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
