"""Nonsense on the command lines of the programs: each takes it or says in a line what is wrong."""

import contextlib
import dataclasses
import io

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nonsense import accepts_or_says_why, values
from train.bert.config import Config as BertConfig
from train.compare import Config as CompareConfig
from train.config import RunConfig, check_folder
from train.glue.config import Config as GlueConfig
from train.lm.config import Config as LMConfig
from train.squad.config import Config as SquadConfig
from train.training import make_optimizer

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
