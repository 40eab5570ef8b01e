"""Programs in which workers would wait for each other for ever, and others that only look so."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from onebit_jax.programs.collective_check import check_collectives


def check(f):
    """Checks ``f(own, common)``, of what each of four workers has for itself and what all share."""
    mesh = jax.make_mesh((2, 2), ("node", "local"), devices=jax.devices()[:4])
    specs = P(("node", "local")), P()
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for spec in specs
    ]
    check_collectives(jax.jit(mapped).trace(*shapes).jaxpr.jaxpr)


EVERYWHERE = ("node", "local")


def exchange_if(flag, x, axes=EVERYWHERE):
    return lax.cond(flag, lambda x: lax.pmean(x, axes), lambda x: x, x)


def exchange_while(flag, x):
    def turn(carry):
        return jnp.any(carry[1] < 0), jax.jit(lambda x: lax.psum(x, EVERYWHERE))(carry[1])

    return lax.while_loop(lambda carry: carry[0], turn, (flag, x))[1]


REFUSED = {
    "own value": lambda own, common: exchange_if(jnp.isfinite(own[0]), common),
    "own index": lambda own, common: exchange_if(lax.axis_index("node") == 0, own),
    "condition made in a loop": lambda own, common: exchange_if(
        lax.fori_loop(0, 3, lambda _, x: x + own[0], 0.0) > 0, common
    ),
    "condition chosen by another": lambda own, common: exchange_if(
        lax.cond(own[0] > 0, lambda: True, lambda: False), common
    ),
    "loop": lambda own, common: exchange_while(own[0] > 0, common),
    "loop that comes to it in its second turn": lambda own, common: exchange_while(
        common[0] > 0, own
    ),
    "shared within a node only": lambda own, common: exchange_if(
        lax.psum(own, "local")[0] > 0, common
    ),
    "after an all-to-all": lambda own, common: exchange_if(
        lax.all_to_all(common, "node", 0, 0, tiled=True)[0] > 0, common
    ),
}
ACCEPTED = {
    "common value": lambda own, common: exchange_if(common[0] > 0, own),
    "flag of all": lambda own, common: exchange_if(
        lax.pmin(jnp.isfinite(own[0]).astype(jnp.int32), EVERYWHERE) > 0, own
    ),
    "gathered": lambda own, common: exchange_if(lax.all_gather(own, EVERYWHERE)[0, 0] > 0, own),
    "nothing exchanged": lambda own, common: lax.cond(own[0] > 0, jnp.sin, jnp.cos, own),
    "shared as far as it is exchanged": lambda own, common: exchange_if(
        lax.axis_index("node") == 0, own, "local"
    ),
    "own values beside a common condition": lambda own, common: lax.scan(
        lambda x, _: (lax.optimization_barrier((x[0], x[1] + exchange_if(x[0] > 0, own))), None),
        (common[0], own),
        length=2,
    )[0][1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_condition_that_workers_do_not_share_is_refused(name):
    with pytest.raises(ValueError, match=r"under a condition that workers along \['local|\['node"):
        check(REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_condition_that_they_share_is_not(name):
    check(ACCEPTED[name])
