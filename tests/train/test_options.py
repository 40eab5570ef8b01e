"""Options of the exchange, which reach the optimizers that have them."""

import jax
import jax.numpy as jnp
import pytest

from tests.train.runs import result, rows
from train.config import RunConfig
from train.lm import pretrain
from train.registry import EXCHANGE, REGISTRY
from train.training import make_optimizer

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_language_model")


# Options of the exchange, which reach the optimizers that have them.


GIVEN = {
    "bits": 2,
    "warmup_bits": 8,
    "variance_refreshes": 4,
    "scale": "mean_abs",
    "residual_dtype": "bfloat16",
}


def state_shapes(name, **options):
    """The shapes of an optimizer's state for two workers, and the compiled update's text."""
    config = RunConfig(optimizers=(name,), workers=2, warmup=10, **options)
    config.check()
    tx = make_optimizer(name, config, lambda params: jax.tree.map(lambda x: True, params))
    rows = {"kernel": jnp.ones((2, 64, 64))}
    state = jax.eval_shape(jax.vmap(tx.init, axis_name="data"), rows)
    traced = jax.make_jaxpr(jax.vmap(tx.update, axis_name="data"))(rows, state, rows)
    return str(jax.tree.structure(state)), str(traced)


@pytest.mark.parametrize("option", EXCHANGE)
def test_an_option_changes_an_optimizer_that_has_it_and_is_refused_where_none_has(option):
    having = [name for name, optimizer in REGISTRY.items() if option in optimizer.options]
    assert having
    assert state_shapes(having[-1]) != state_shapes(having[-1], **{option: GIVEN[option]})
    with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')} .*: expected nothing"):
        state_shapes("adam", **{option: GIVEN[option]})


@pytest.mark.slow
def test_nodes_average_densely_and_bits_cross_between_them(tmp_path):
    out = tmp_path / "run"
    command = (
        "--workers 4 --nodes 2 --batch-size 8 --sequence-length 16 --steps 3 --warmup 1 "
        "--schedule-warmup 1 --eval-batches 1 --optimizers compressed_mean_adam --bits 4"
    )
    assert pretrain.main([*command.split(), "--out", str(out)]) == 0
    folder = out / "compressed_mean_adam"
    assert [row["phase"] for row in rows(folder)] == ["compression"] * 3
    sent = result(folder)["wire"].splitlines()
    between = [line for line in sent if " node " in line and " u8 " in line]
    assert between
    assert any(" local " in line for line in sent)


def test_help_names_all_optimizers(capsys):
    with pytest.raises(SystemExit, match="0"):
        pretrain.main(["--help"])
    said = "".join(capsys.readouterr().out.replace("│", "").split())
    assert all(name in said for name in REGISTRY)
    assert all(f"--{option.replace('_', '-')}" in said for option in EXCHANGE)
