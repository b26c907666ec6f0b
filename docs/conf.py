"""How Sphinx builds the documents: `make docs`."""

from importlib.metadata import version as version_of

project = "autosched"
author = "The autosched developers"
copyright = author
version = release = version_of("autosched")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {}
python_maximum_signature_line_length = 88
nitpicky = False
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "autosched"
html_static_path = []


def _drop_generated(app, what, name, obj, options, lines):
    """Drop text that Python generates: for fields of named tuples, and for data."""
    generated = bool(lines) and lines[0].startswith("Alias for field number")
    if generated or (what == "data" and obj.__doc__ is type(obj).__doc__):
        lines.clear()


def setup(app):
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", _drop_generated)
