"""How Sphinx builds these pages: `make docs`."""

import re

import onebit_jax

project = "onebit_jax"
author = "The onebit_jax authors"
copyright = f"2026, {author}"
version = release = onebit_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"onebit_jax {version}"

myst_heading_anchors = 3

# Single backticks in docstrings are code.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Differences from the paper"]
napoleon_use_ivar = True
napoleon_use_rtype = False

# Others' objects have no page here: their names stay text.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(collections|jax|numpy|optax)\..*")]

_REPOSITORY = "https://github.com/onebit-jax/onebit_jax/blob/main/"


def _link_to_the_repository(app, docname, source):
    """Files outside of docs/ have no page: a link to one leads to the repository."""
    source[0] = re.sub(r"\]\(\.\./(?!\.)", f"]({_REPOSITORY}", source[0])


def _adapt_docstring(app, what, name, obj, options, lines):
    """Docstrings name guides by their path in the repository, and Napoleon an array by its own."""
    text = "\n".join(lines).replace("jax.jaxlib._jax.Array", "jax.Array")
    lines[:] = re.sub(r"\bdocs/([\w-]+)\.md", r":doc:`/\1`", text).split("\n")


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _adapt_docstring)
    app.connect("source-read", _link_to_the_repository)
