"""The documents: their code runs, prints and draws what they show, and the API pages are complete."""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch

import autosched as asc

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
pages = importlib.import_module("pages")
sys.path.remove(str(DOCS))


# The commands start many processes, the planning searches in several threads, the others train.
SLOW = (
    "commands",
    "compile_training",
    "memory",
    "parallel_training",
    "pipeline_orders",
    "planning",
    "problems",
    "tutorial",
)
PAGES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
    for path in pages.pages()
]


@pytest.mark.parametrize("path", PAGES)
def test_the_code_of_a_page_prints_and_draws_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        for block in pages.run(path.read_text(encoding="utf-8"), path.name):
            assert block.holds, f"{block.code}\nprints\n{block.printed}\nand not\n{block.expected}"
    finally:
        torch.set_num_threads(threads)
    for picture in tmp_path.glob("*.svg"):
        assert picture.read_bytes() == (pages.PICTURES / picture.name).read_bytes(), (
            f"{picture.name} is out of date"
        )


def test_the_notebook_has_the_text_the_code_and_the_output_of_the_tutorial():
    cells = json.loads(pages.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == list(pages.cells())
    outputs = [
        cell["outputs"]
        for cell, (kind, text) in zip(cells, found, strict=True)
        if kind == "code" and not text.startswith("SVG(")
    ]
    assert all(
        output["output_type"] == "stream" and output["name"] == "stdout"
        for some in outputs
        for output in some
    )
    printed = ["".join(chain.from_iterable(output["text"] for output in some)) for some in outputs]
    said = [
        match["output"] or ""
        for match in pages.BLOCK.finditer(pages.TUTORIAL.read_text(encoding="utf-8"))
    ]
    assert list(map(words, printed)) == list(map(words, said))


def words(text: str) -> list[str]:
    """Return the words of a text without source locations, which differ in a notebook."""
    return re.sub(r"\(\w+\.(md|py):\d+\)", "", text).split()


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.stem)
def test_headings_leave_out_no_level(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.stem)
def test_every_page_that_is_linked_is_there(path: Path):
    for target in pages.links(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


TARGET = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)", re.MULTILINE)


def documented() -> dict[str, list[object]]:
    """Return the objects that the API pages document, by page."""
    found: dict[str, list[object]] = {}
    for page in sorted((DOCS / "api").glob("*.md")):
        current = "autosched"
        for kind, target in TARGET.findall(page.read_text(encoding="utf-8")):
            if kind == "currentmodule":
                current = target
                continue
            path = target if target.startswith("autosched.") else f"{current}.{target}"
            where, _, name = path.rpartition(".")
            found.setdefault(page.stem, []).append(pkgutil.resolve_name(f"{where}:{name}"))
    return found


@pytest.mark.parametrize("module", [asc, asc.parallel, asc.testing, asc.viz, asc.errors])
def test_every_public_name_is_on_an_api_page(module: ModuleType):
    objects = [id(item) for items in documented().values() for item in items]
    missing = [name for name in public(module) if id(getattr(module, name)) not in objects]
    assert not missing


def public(module: ModuleType) -> list[str]:
    """Return the public names of a module; of ``errors``, the exceptions."""
    if module is not asc.errors:
        return list(module.__all__)
    exceptions = inspect.getmembers(module, inspect.isclass)
    return [name for name, item in exceptions if issubclass(item, asc.AutoschedError)]


def test_no_object_is_on_two_api_pages():
    objects = [id(item) for items in documented().values() for item in items]
    assert len(objects) == len(set(objects))


def test_everything_on_an_api_page_has_a_docstring():
    for items in documented().values():
        for item in items:
            assert item.__doc__ or not callable(item), item


@pytest.mark.parametrize("path", sorted((DOCS / "howto").glob("*.md")), ids=lambda path: path.stem)
def test_a_guide_is_short_and_runs_code(path: Path):
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= 500
    assert "```python" in text
