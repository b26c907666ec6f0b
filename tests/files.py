"""Modules of users', written where a test wants them to be."""

import importlib.util
from pathlib import Path
from types import ModuleType


def module_at(file: Path, text: str) -> ModuleType:
    """Write a module to a file, and import it from there by the name of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
