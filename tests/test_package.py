"""The wheel, which works where the repository is not, and the steps of the Containerfile."""

import email
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

import onebit_jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
NO_SOURCES = (".*", "__pycache__", "*.egg-info", "build", "dist", "_build", "runs")


def run(*command, cwd):
    """What a command prints, away from the repository and from this process's settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XLA_"))}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, so that no leftover of an earlier build gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*NO_SOURCES))
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, folder / "tree", cwd=folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with the wheel, and with what this one has installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    interpreter = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", interpreter)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # Last: pip would find the repository's own onebit_jax there. Its .pth file has no effect there.
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    pathlib.Path(paths["purelib"], "dependencies.pth").write_text("\n".join(sorted(installed)))
    return interpreter


def test_the_wheel_holds_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        fields = email.message_from_bytes(file.read(metadata))
    information = metadata.removesuffix("METADATA")
    held = {name for name in names if not name.startswith(information)}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "onebit_jax").rglob("*.py")}
    assert held == modules | {"onebit_jax/py.typed"}
    assert information + "licenses/LICENSE" in names
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Version"] == onebit_jax.__version__


def test_the_installed_library_is_the_wheels(python, tmp_path):
    code = "import importlib.metadata as m, onebit_jax as o; print(o.__file__, o.__version__, "
    code += "m.version('onebit_jax'), sep='\\n')"
    path, version, recorded = run(python, "-c", code, cwd=tmp_path).splitlines()
    assert pathlib.Path(path).is_relative_to(python.parent.parent)
    assert version == recorded == onebit_jax.__version__
    assert run(python.parent / "onebit-jax", "--version", cwd=tmp_path) == f"onebit-jax {version}\n"


@pytest.mark.slow
def test_the_program_of_start_and_the_plan_of_the_readme_run_from_the_wheel(python, tmp_path):
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", start, re.DOTALL)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    printed = run(python, "program.py", cwd=tmp_path)
    losses = [float(x) for x in re.findall(r"loss (\S+) compression", printed)]
    assert losses[-1] < losses[0]
    assert re.search(r"^compression +all-to-all +u8 ", printed, re.MULTILINE)

    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    [command] = re.findall(r"^    python (-m onebit_jax plan .*)", readme, re.MULTILINE)
    [verdict] = re.findall(r"^Its first line is the verdict: `(.*)`$", readme, re.MULTILINE)
    assert run(python, *shlex.split(command), cwd=tmp_path).splitlines()[0] == verdict


def test_links_of_the_readme_work_where_it_stands_alone():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.findall(r"\]\((?!https://|#)[^)]*\)", readme)
    targets = re.findall(r"^\[[^]]+\]: (.*)", readme, re.MULTILINE)
    assert targets
    for target in targets:
        assert target.startswith("https://github.com/onebit-jax/onebit_jax/blob/main/")
        assert (ROOT / target.partition("/blob/main/")[2]).is_file()


# The Containerfile's steps, as far as they can be tried without a container.

TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text())
RUNS = re.findall(r"^RUN (.*)", TEXT, re.MULTILINE)


def test_what_it_copies_is_there():
    copied = [
        x for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for x in line.split()
    ]
    assert {"pyproject.toml", "onebit_jax", "train", "examples"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_its_last_step_takes_the_options_that_the_program_has():
    command = RUNS[-1].split()
    assert command[:2] == ["python", "examples/hosts.py"]
    program = (ROOT / command[1]).read_text()
    assert all(f'"{x}"' in program for x in command if x.startswith("--"))
