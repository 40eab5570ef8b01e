"""The folders of the library depend on each other one way."""

import ast
import graphlib
import pathlib

import onebit_jax

ROOT = pathlib.Path(onebit_jax.__file__).parent
FOLDERS = {path.parent.name for path in ROOT.glob("*/__init__.py")}


def imported(path):
    """The folders that a module imports from; the top level's own modules have the name ""."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == ROOT.name:
                folder = rest.partition(".")[0]
                yield folder if folder in FOLDERS else ""


def test_folders_depend_on_each_other_one_way():
    """Where they do not, `static_order` raises ``CycleError`` with the circle."""
    # The package's own namespace is above all folders, the other modules of the top level below.
    modules = {path: path.parent.name for path in ROOT.glob("*/*.py")}
    below = {path: "" for path in ROOT.glob("*.py") if not path.name.startswith("__")}
    graph = {}
    for path, folder in (modules | below).items():
        graph.setdefault(folder, set()).update(set(imported(path)) - {folder})
    assert graph.keys() > FOLDERS
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("") == 0
