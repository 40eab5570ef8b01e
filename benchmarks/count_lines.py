"""Counts code (no blank lines, comments or docstrings) and what `onebit_jax` exports.

    python -m benchmarks.count_lines
    python -m benchmarks.count_lines --against REVISION

`tests/test_budget.py` holds the limits.
"""

import argparse
import ast
import collections
import inspect
import io
import pathlib
import subprocess
import tokenize
from collections.abc import Mapping
from typing import NamedTuple

import optax

import onebit_jax

FOLDERS = ("onebit_jax", "train", "tests", "benchmarks")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Tokens that are no code: their lines count only where other tokens stand on them.
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Module(NamedTuple):
    """The lines of code of a module, and of each of its functions, methods and inner functions."""

    lines: int
    functions: dict[str, int]


def count(source: str) -> Module:
    """Counts a module's code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
        elif not isinstance(node, ast.Module | ast.ClassDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(_places(node.body[0]))
    return Module(len(lines), {f"{x.lineno} {x.name}": len(lines & _places(x)) for x in functions})


def _places(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def tree() -> dict[str, Module]:
    """All modules of the working tree by their paths."""
    paths = (path for folder in FOLDERS for path in (_ROOT / folder).rglob("*.py"))
    return {path.relative_to(_ROOT).as_posix(): count(path.read_text()) for path in paths}


def revision(name: str) -> dict[str, Module]:
    """All modules of a revision by their paths."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    paths = git("ls-tree", "-r", "--name-only", "--full-tree", name, *FOLDERS).splitlines()
    return {path: count(git("show", f"{name}:{path}")) for path in paths if path.endswith(".py")}


def by_folder(modules: Mapping[str, Module]) -> dict[str, list[Module]]:
    """The modules of each folder, and of those in `onebit_jax`."""
    found: dict[str, list[Module]] = collections.defaultdict(list)
    for path, module in modules.items():
        top, *inner = path.split("/")
        found[top].append(module)
        if top == "onebit_jax":
            found[f"{top}/{inner[0] if len(inner) > 1 else '*.py'}"].append(module)
    return dict(sorted(found.items()))


def lines(modules: list[Module]) -> int:
    """Lines of code of modules together."""
    return sum(module.lines for module in modules)


def parameters() -> dict[str, int]:
    """Numbers of parameters of the functions in `onebit_jax` that make a transformation."""
    public = {name: getattr(onebit_jax, name) for name in onebit_jax.__all__}
    signatures = {name: inspect.signature(x) for name, x in public.items() if inspect.isfunction(x)}
    return {
        name: len(signature.parameters)
        for name, signature in signatures.items()
        if inspect.isclass(signature.return_annotation)
        and issubclass(signature.return_annotation, optax.GradientTransformation)
    }


def measures(modules: Mapping[str, Module]) -> dict[str, int]:
    """What `tests/test_budget.py` limits."""
    folders, makers = by_folder(modules), parameters()
    library = folders["onebit_jax"]
    return {
        **{f"{folder}: lines": lines(folders[folder]) for folder in FOLDERS},
        "onebit_jax: files": len(library),
        "onebit_jax: lines of the longest module": max(module.lines for module in library),
        "onebit_jax: lines of the longest function": max(
            n for module in library for n in module.functions.values()
        ),
        "onebit_jax: exported names": len(onebit_jax.__all__),
        "parameters of onebit_adam": makers["onebit_adam"],
        "parameters of all that make a transformation": sum(makers.values()),
    }


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="count a revision's lines too")
    options = parser.parse_args()
    now = tree()
    before = by_folder(revision(options.against)) if options.against else {}
    folders = by_folder(now)
    print(f"{'':28}{options.against or '':>10.10}{'lines':>10}{'files':>10}{'functions':>10}")
    for folder in sorted(folders.keys() | before.keys()):
        was = f"{lines(before[folder]):,}" if folder in before else ""
        found = folders.get(folder, [])
        functions = sum(len(module.functions) for module in found)
        print(f"{folder:28}{was:>10}{lines(found):>10,}{len(found):>10,}{functions:>10,}")
    for measure, value in measures(now).items():
        print(f"{measure:48}{value:>10,}")


if __name__ == "__main__":
    main()
