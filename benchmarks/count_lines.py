"""Counts lines of code per folder: no blank lines, comments or docstrings.

python -m benchmarks.count_lines [--against REVISION]
"""

import argparse
import ast
import collections
import io
import pathlib
import subprocess
import tokenize

FOLDERS = ("onebit_jax", "train", "tests", "benchmarks")
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


def code_lines(source: str) -> int:
    """The number of lines with code on them."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def counts(sources: dict[str, str]) -> collections.Counter[str]:
    """Lines of code by folder, given files by their paths; top-level modules count as a folder."""
    total: collections.Counter[str] = collections.Counter()
    for path, source in sources.items():
        top, *inner = pathlib.PurePosixPath(path).parts
        lines = code_lines(source)
        total[top] += lines
        if top == "onebit_jax":
            total[f"{top}/{inner[0]}" if len(inner) > 1 else f"{top}/*.py"] += lines
    return total


def sources(revision: str | None) -> dict[str, str]:
    """The Python files git tracks in the folders, in the working tree or in a revision."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    if revision is None:
        paths = git("ls-files", *FOLDERS).split("\n")
        found = {path: pathlib.Path(path) for path in paths if path.endswith(".py")}
        return {path: file.read_text() for path, file in found.items() if file.exists()}
    paths = git("ls-tree", "-r", "--name-only", revision, *FOLDERS).split("\n")
    return {path: git("show", f"{revision}:{path}") for path in paths if path.endswith(".py")}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="REVISION", help="count a revision too")
    options = parser.parse_args()
    now = counts(sources(None))
    before = counts(sources(options.against)) if options.against else None
    for folder in sorted(now | (before or collections.Counter())):
        was = "" if before is None else f"{before[folder]:>8,}"
        print(f"{folder:<28}{was}{now[folder]:>8,}")


if __name__ == "__main__":
    main()
