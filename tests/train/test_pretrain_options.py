"""The options of the pre-training program: bad input, and learning rates over a run."""

import runpy
import sys
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.train.runs import assert_refused
from train.bert import pretrain
from train.bert.pretrain import Config
from train.folder import check_folder, write_config

STEPS = 12
RUN = (
    "--workers 2 --batch-size 16 --sequence-length 32 --vocab-size 300 --schedule-warmup 2 "
    f"--steps {STEPS} --warmup 6"
).split()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--learning-rate nan", "--learning-rate nan: expected a finite number above 0"),
        ("--batch-size 7", "--batch-size 7: expected a multiple of 2, microbatches"),
        ("--batch-size 6 --accumulation 2", "--batch-size 6: expected a multiple of 4"),
        ("--workers 9 --batch-size 9", "data = 9: a device each, but 1 processes have 8 (cpu)"),
        ("--workers 0", "--workers 0: expected a whole number of at least 1"),
        ("--warmup 0", "--warmup 0: expected a number of steps above 0, or a share"),
        (
            "--warmup auto --optimizers adam zero_one_adam",
            "or a share of them below 1, with zero_one_adam",
        ),
        (
            "--warmup auto --optimizers adam onebit_adam --steps 100",
            "below 1, with fewer than 100 steps",
        ),
        ("--b1 1", "--b1 1.0: expected a number from 0 to below 1"),
        ("--schedule-warmup 12", "--schedule-warmup 12: expected 0 or more, and fewer than"),
        ("--sequence-length 513", "--sequence-length 513: expected at most 512"),
        ("--seeds 1 1", "--seeds (1, 1): expected whole numbers from 0"),
        (
            "--optimizers adam adam",
            "--optimizers ('adam', 'adam'): expected one or more, each once, of adam",
        ),
        ("--optimizers rprop", "--optimizers ('rprop',): expected one or more"),
        ("--bits 4", "--bits 4: expected nothing, since none of adam, onebit_adam has it"),
        ("--warmup-bits 5", "warmup_bits"),
        ("--nodes 3", "--nodes 3: expected a number that divides --workers 2"),
        ("--processes 2", "--processes 2: expected 1 without a --coordinator"),
        ("--corpus NOWHERE", "NOWHERE has no text in 0 .txt files"),
        ("--vocab NOWHERE", "NOWHERE"),
        ("--vocab VOCABULARY", "[MASK]"),
        ("--corpus LATIN", "UTF-8"),
        ("--corpus SHORT --heldout ALIKE", "there are 3 sequences"),
        ("--corpus SHORT --heldout SHORT/../short", "corpus and heldout are one folder, SHORT:"),
        ("--heldout SHORT", "there are 3 sequences"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(options, complaint, tmp_path, capsys):
    (tmp_path / "vocabulary").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    for name, content in (
        ("latin", "d\xe9j\xe0 vu\n".encode("latin-1")),
        ("short", b"One line. And two.\n\nAnother text. Ends.\n\nA third. It ends.\n"),
        ("alike", b"One line. And two.\n\nAnother text. Ends.\n\nA third. It ends.\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_bytes(content)
    for name in ("NOWHERE", "VOCABULARY", "LATIN", "SHORT", "ALIKE"):
        path = str(tmp_path / name.lower())
        options, complaint = options.replace(name, path), complaint.replace(name, path)
    assert_refused(pretrain.main, [*RUN, *options.split()], complaint, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    "program", [*("bert.pretrain", "lm.pretrain", "compare"), *("glue", "squad", "resnet", "dcgan")]
)
def test_bad_input_from_the_shell(program, tmp_path, monkeypatch, capsys):
    """As `python -m` runs a program, in this process."""
    name, out = f"train.{program}", tmp_path / "a"
    monkeypatch.setattr(sys, "argv", [name, "--process-timeout", "5", "--out", str(out)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err == "error: --process-timeout 5: expected at least 6 seconds\n"
    assert not out.exists()


def test_an_output_folder_that_is_a_url_is_refused():
    with pytest.raises(ValueError, match="--out s3://bucket/run: expected the path of a folder"):
        Config(out="s3://bucket/run").check()


def test_steps_may_grow_where_no_learning_rate_depends_on_them(tmp_path):
    write_config(Config(out=str(tmp_path), schedule="exponential", steps=800))
    check_folder(Config(out=str(tmp_path), schedule="exponential", steps=900, optimizers=("adam",)))
    with pytest.raises(ValueError, match="--decay-every 520, this one has 10"):
        check_folder(Config(out=str(tmp_path), schedule="exponential", decay_every=10))


@pytest.mark.parametrize(
    "options", [{"warmup": 0.2}, {"schedule_warmup": 0.1}, {"optimizers": ("thresholded_adam",)}]
)
def test_steps_may_not_grow_where_anything_is_a_share_of_them(options, tmp_path):
    given: Any = {"out": str(tmp_path), "schedule": "exponential"} | options
    write_config(Config(**given, steps=800))
    with pytest.raises(ValueError, match="--steps 800, this one has 900"):
        check_folder(Config(**given, steps=900))


def test_several_workers_on_cpus_take_no_program_from_a_cache(tmp_path, capsys):
    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_enable_compilation_cache": True,
    }
    before = {name: getattr(jax.config, name) for name in options}
    compiled = []

    def compile_one(number):
        jax.jit(lambda x: x + number)(1.0)
        compiled.append(len(list(tmp_path.iterdir())))

    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compile_one(1.0)
        compilation_cache.reset_cache()
        assert pretrain.main([*RUN, "--corpus", str(tmp_path / "nowhere")]) == 2
        compile_one(2.0)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert "nowhere" in capsys.readouterr().err
    assert compiled[0] == compiled[1] > 0
