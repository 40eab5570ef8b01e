"""Checks of the optimizers and the schedule that local steps are given."""

from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, use_abstract_mesh

from onebit_jax import validation
from onebit_jax.programs.collective_check import collectives
from onebit_jax.transforms.promotion import usual_promotion


def check_exchanges_nothing(
    inner: optax.GradientTransformationExtraArgs, params: Any, state: Any
) -> None:
    """Raises ``ValueError`` for an inner optimizer that calls a collective."""
    program = jax.make_jaxpr(lambda g, s, p: inner.update(g, s, p))(params, state, params)
    found: Iterator[Any] = collectives([cast(Jaxpr, program.jaxpr)])
    for eqn in found:
        raise ValueError(
            f"the inner optimizer of local_steps calls {eqn.primitive.name}: it would exchange in "
            f"every step what local steps are there to save. Give one without an exchange, such as "
            f"optax.adamw(1e-3)."
        )


def check_schedule(every: Any, fragments: Any, delay: Any) -> None:
    """Raises ``ValueError`` for a schedule of exchanges that does not come out even."""
    validation.check_static("fragments", fragments)
    validation.check_step_count("fragments", fragments, 1, "1 exchanges all tensors at once.")
    if callable(every):
        _check_gaps(every)
    else:
        validation.check_step_count("every", every, 1, "Give the updates per exchange.")
    unknown = callable(every) or isinstance(every, jax.core.Tracer)
    if fragments > 1 and (unknown or every % fragments):
        raise ValueError(
            f"every={every!r} must be a number, and a multiple of fragments={fragments}: groups of "
            f"tensors take turns every / fragments updates apart."
        )
    validation.check_delay(delay)


def _check_gaps(every: Any) -> None:
    mend = (
        "it must return one integer, 1 or more: after so many updates workers exchange again, as "
        "every=lambda count: jnp.where(count < 1000, 8, 32)."
    )
    with usual_promotion(), jax.ensure_compile_time_eval():
        returned = jax.tree.leaves(jax.eval_shape(every, jax.ShapeDtypeStruct((), jnp.int32)))
        one = len(returned) == 1 and returned[0].shape == ()
        if not one or not jnp.issubdtype(returned[0].dtype, jnp.integer):
            raise ValueError(f"every={every!r} returns {returned}; {mend}")
        if (first := int(every(jnp.int32(0)))) < 1:
            raise ValueError(f"every={every!r} returns {first} for update 0; {mend}")


# The update counts at which an outer optimizer is tested: a schedule may begin at 0.
_TRIED = (*range(10), *(10**k for k in range(1, 7)))


def check_moves(outer: optax.GradientTransformation, params: Any) -> None:
    """Raises ``ValueError`` for an outer optimizer whose steps are always 0.

    Tests it on small tensors in a tree like the parameters, while the program is traced.
    """
    rng = np.random.default_rng(0)
    # Beside a mesh that a user has set arrays would be placed on it, which a program's map cannot.
    with jax.ensure_compile_time_eval(), use_abstract_mesh(AbstractMesh((), ())):
        tried = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(2,) * p.ndim), "f4"), params)
        state = outer.init(tried)
        for count in _TRIED:
            at = jax.tree.map(
                lambda x, n=count: jnp.full_like(x, n) if x.dtype == jnp.int32 else x, state
            )
            updates, _ = outer.update(tried, at, tried)
            moves = jax.tree.leaves(updates)
            if not moves or any(np.any(np.asarray(x) != 0) for x in moves):
                return
    raise ValueError(
        "the outer optimizer of local_steps leaves parameters as they are, whatever the workers "
        "learned: its learning rate is 0. Give one that moves, such as optax.sgd(0.7, "
        "momentum=0.9, nesterov=True)."
    )
