"""The code in the READMEs runs, and prints what they say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(path: str, language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL
    )


def test_the_code_of_the_readme_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        for block in blocks("README.md", "python"):
            exec(block, names)
    names.clear()  # functions refer to them, and they to schedules
    expected = blocks("README.md", "text")[0].removesuffix("...\n")
    assert printed.getvalue().startswith(expected)
    table = printed.getvalue().partition("sixteen products: predicted\n")[2].splitlines()
    rows = [line.split("  ") for line in table if " GPUs, " in line]
    assert len(rows) == 8
    # If the graph bound all tasks to devices, all rows would be equal.
    assert len({tuple(row[2:]) for row in rows}) > 4


@pytest.mark.parametrize("path", ["README.md", "autosched/README.md", "CONTRIBUTING.md"])
def test_every_file_that_is_named_is_there(path: str):
    text = (ROOT / path).read_text(encoding="utf-8")
    here = (ROOT / path).parent
    linked = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    named = re.findall(r"`([\w/]+\.py)`", text) if path == "autosched/README.md" else []
    for target in [*linked, *named]:
        assert (here / target).exists() or (ROOT / target).exists(), target


@pytest.mark.parametrize(("path", "most"), [("README.md", 1260), ("autosched/README.md", 1500)])
def test_a_readme_is_short(path: str, most: int):
    assert len((ROOT / path).read_text(encoding="utf-8").split()) <= most
