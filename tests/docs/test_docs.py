"""The code in the documents runs, prints and draws what they say, and the notebook has the tutorial's code."""

import importlib
import json
import re
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
pages = importlib.import_module("pages")
sys.path.remove(str(DOCS))


# The commands start many processes.
PAGES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem == "commands" else [])
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


def test_the_notebook_runs_the_code_of_the_tutorial_and_prints_what_it_prints():
    cells = [
        c
        for c in json.loads(pages.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if c["cell_type"] == "code"
    ]
    code = ["".join(cell["source"]) for cell in cells]
    assert code == [cell for kind, cell in pages.cells() if kind == "code"]
    outputs = [
        cell["outputs"]
        for cell, text in zip(cells, code, strict=True)
        if not text.startswith("SVG(")
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
    """Return the words of a text without the places in code that it names, which are others in a notebook."""
    return re.sub(r"\(\w+\.(md|py):\d+\)", "", text).split()


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.stem)
def test_every_page_that_is_linked_is_there(path: Path):
    for target in pages.links(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
