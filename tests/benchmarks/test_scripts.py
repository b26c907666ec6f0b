"""What scripts of benchmarks take from the package and from the tests exists."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import autosched as asc

FOLDER = Path(__file__).parents[2] / "benchmarks"


def missing(node: ast.AST) -> Iterator[str]:
    """Yield what an import, or an attribute of the package, names and does not exist."""
    match node:
        case ast.ImportFrom(module=str(module), names=names, level=0):
            if module.partition(".")[0] in ("autosched", "tests"):
                found = importlib.import_module(module)
                for item in names:
                    full = f"{module}.{item.name}"
                    is_module = hasattr(found, "__path__") and importlib.util.find_spec(full)
                    if not hasattr(found, item.name) and not is_module:
                        yield full
        case ast.Attribute(value=ast.Name(id="asc"), attr=name):
            if not hasattr(asc, name):
                yield f"asc.{name}"


def test_what_a_script_takes_exists():
    nodes = (
        (path.name, node)
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert not [(name, what) for name, node in nodes for what in missing(node)]
