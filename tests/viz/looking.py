"""A real browser without a display, for tests that look at pages; `make browser` installs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1]
MODULES = HERE.parent / ".venv" / "browser"

INSTALLED = (MODULES / "node_modules" / "puppeteer-core").is_dir()

needs_browser = pytest.mark.skipif(
    not INSTALLED, reason="there is no browser; `make browser` installs one"
)


def look(page: Path | str, script: str = "", picture: Path | str = "", **options: Any) -> Any:
    """Open a page, return what a script returns there, and take a picture; any fault of the page is an error here."""
    command = [
        "node",
        HERE / "browser" / "look.mjs",
        MODULES,
        page,
        script,
        picture,
        json.dumps(options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
