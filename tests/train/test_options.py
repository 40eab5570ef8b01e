"""Options of all programs: nonsense is refused in a line, those of the exchange reach it."""

import contextlib
import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from train.registry import EXCHANGE, Setting
from tests.nonsense import accepts_or_says_why, values
from tests.train.runs import result, rows
from train.bert.config import Config as BertConfig
from train.compare import Config as CompareConfig
from train.config import RunConfig
from train.folder import check_folder
from train.glue.config import Config as GlueConfig
from train.lm import pretrain
from train.lm.config import Config as LMConfig
from train.optimizers import OPTIMIZERS
from train.squad.config import Config as SquadConfig
from train.training import make_optimizer

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_language_model")

PROGRAMS = [BertConfig, LMConfig, CompareConfig, GlueConfig, SquadConfig]
TEXTS = ["nan", "inf", "-inf", "0", "-1", "1e400", "1e308", "1e-320", "9" * 30, "9" * 300]
TEXTS += ["2147483648", "0.5", "1e3", "²", "\uff11", "", "x", "None", "[1]", "True", "auto"]
TEXTS += ["adam", "/", "/dev/null"]


def names(program):
    return [field.name for field in dataclasses.fields(program)]


def check(options):
    """All that a program finds out of its options before it looks at its input."""
    options.check()
    if isinstance(options, BertConfig | LMConfig):
        check_folder(options)
        options.learning_rate_schedule()(0)
        for name in options.optimizers:
            make_optimizer(name, options, lambda params: params)


def calls(given_ones):
    """A program, and one or two of its options with such values."""

    def of(program):
        options = st.dictionaries(
            st.sampled_from(names(program)), given_ones, min_size=1, max_size=2
        )
        return st.tuples(st.just(program), options)

    return st.sampled_from(PROGRAMS).flatmap(of)


def hold_programs_to(examples):
    @settings(max_examples=examples, deadline=None)
    @given(calls(st.sampled_from(TEXTS)))
    def of_command_line(call):
        refused_in_a_line(*call)

    @settings(max_examples=examples, deadline=None)
    @given(calls(values))
    def of_objects(call):
        program, options = call
        accepts_or_says_why(lambda: program(**options).check())

    of_command_line()
    of_objects()


def parsed(program, texts):
    """The options, or None where the parser refuses them, with exit code 2."""
    arguments = [f"--{name.replace('_', '-')}={text}" for name, text in texts.items()]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return tyro.cli(program, args=arguments)
        except SystemExit as ended:
            code = ended.code
    assert code == 2
    assert said.getvalue()
    return None


def refused_in_a_line(program, texts):
    """As the programs do, which print a `ValueError` or an `OSError` behind `error: `."""
    options = parsed(program, texts)
    if options is None:
        return
    try:
        check(options)
    except (ValueError, OSError) as error:
        line = str(error)
    else:
        return
    assert line.strip()
    assert len(line.splitlines()) == 1


def test_options_that_are_nonsense_are_refused_in_a_line():
    hold_programs_to(40)


@pytest.mark.slow
def test_every_option_that_is_nonsense_is_refused_in_a_line():
    hold_programs_to(2000)
    for program in PROGRAMS:
        for name in names(program):
            for text in TEXTS:
                refused_in_a_line(program, {name: text})


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("processes", "0"),
        ("steps", "2147483648"),
        ("sequence-length", "0"),
        ("diagnose-every", "0"),
        ("warmup", "2147483648"),
    ],
)
def test_numbers_that_ended_in_a_traceback(option, text):
    options: RunConfig | None = parsed(LMConfig, {option: text})
    assert options is not None
    with pytest.raises(ValueError, match=f"^--{option} {text}: expected "):
        options.check()


# Options of the exchange, which reach the optimizers that have them.


GIVEN = {
    "bits": 2,
    "warmup_bits": 8,
    "variance_refreshes": 4,
    "scale": "mean_abs",
    "residual_dtype": "bfloat16",
    "local_dtype": "bfloat16",
    "bucket_bytes": 128,
    "form": "two-stage",
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
    having = [name for name, optimizer in OPTIMIZERS.items() if option in optimizer.options]
    assert having
    # Within a node alone another type matters.
    if option != "local_dtype":
        plain, changed = (
            state_shapes(having[-1]),
            state_shapes(having[-1], **{option: GIVEN[option]}),
        )
        assert plain != changed
    with pytest.raises(ValueError, match=f"^--{option.replace('_', '-')} .*: expected nothing"):
        state_shapes("adam", **{option: GIVEN[option]})


def test_every_option_is_a_field_of_all_programs():
    assert set(EXCHANGE) == set(GIVEN)
    assert set(EXCHANGE) <= {field.name for field in dataclasses.fields(RunConfig)}
    assert "exchange" in {field.name for field in dataclasses.fields(Setting)}


@pytest.mark.slow
def test_nodes_average_densely_and_bits_cross_between_them(tmp_path):
    out = tmp_path / "run"
    command = (
        "--workers 4 --nodes 2 --batch-size 8 --sequence-length 16 --steps 3 --warmup 1 "
        "--schedule-warmup 1 --eval-batches 1 --optimizers compressed_mean_adam --bits 4 "
        "--local-dtype bfloat16"
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
    assert all(name in said for name in OPTIMIZERS)
    assert all(f"--{option.replace('_', '-')}" in said for option in EXCHANGE)
