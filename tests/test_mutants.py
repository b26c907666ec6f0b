"""The deliberate bugs of ``mutants.toml``: each can be planted, and (``slow``) its test fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
SECONDS = 300  # a test that takes longer has caught nothing

each = pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: re.sub(r"\W+", "_", mutant["bug"])
)


def mutated(mutant: dict[str, str]) -> str:
    """Return the module's source with the bug in it."""
    source = (ROOT / mutant["file"]).read_text(encoding="utf-8")
    count = source.count(mutant["old"])
    assert count == 1, (
        f"{mutant['old']!r} must stand once in {mutant['file']}, and does {count} times"
    )
    return source.replace(mutant["old"], mutant["new"])


@each
def test_a_bug_can_still_be_planted_and_its_test_is_there(mutant: dict[str, str]) -> None:
    compile(mutated(mutant), mutant["file"], "exec")
    path, _, test = mutant["test"].partition("::")
    assert re.search(rf"^def {test}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_at_most_forty() -> None:
    """So each is worth its upkeep; one that protects more takes the place of another."""
    assert len({mutant["bug"] for mutant in MUTANTS}) == len(MUTANTS) <= 40


@pytest.mark.slow
@each
def test_every_deliberate_bug_is_caught(mutant: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / mutant["file"]).write_text(mutated(mutant), encoding="utf-8")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-rf"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--hypothesis-profile=unshrunk", mutant["test"]],
        cwd=copy,  # which comes first on the path
        # Inductor would take from its cache what correct code has compiled.
        env={
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = re.findall(r"^FAILED (\S+?\.py::\w+)", ended.stdout, re.MULTILINE)
    assert found == [mutant["test"]], ended.stdout
