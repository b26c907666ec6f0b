"""Run the code in the documents and update its output in them; make the tutorial's notebook.

    python docs/pages.py            # rewrite what is out of date
    python docs/pages.py --notebook # also run the tutorial as a notebook, with its pictures

A block of ``python`` is code. All blocks of a page share their variables, and a block that begins
with ``# name.py`` is also written to that file. A block of ``console`` has commands, ``$ autosched
...``. A block of ``text`` directly after either is the expected output, in which ``...`` matches
anything. Pictures that a page draws are stored in ``pictures/``.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
TUTORIAL, NOTEBOOK = HERE / "tutorial.md", HERE.parent / "examples" / "tutorial.ipynb"
BLOCK = re.compile(
    r"```(?P<kind>python|console)\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)


class Block(NamedTuple):
    """Code, its expected output, and its actual output."""

    code: str
    expected: str
    printed: str

    @property
    def holds(self) -> bool:
        """Whether the actual output matches the expected one."""
        return OutputChecker().check_output(self.expected, self.printed, ELLIPSIS)


def pages() -> list[Path]:
    """Return the pages, in the order of their names."""
    return [path for path in sorted(HERE.rglob("*.md")) if "_build" not in path.parts]


def links(text: str) -> list[str]:
    """Return the files that the text of a page links or shows; blocks of code do not count."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in target]


def run(text: str, name: str) -> Iterator[Block]:
    """Run the blocks of a page one after another."""
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for match in BLOCK.finditer(text):
            code = match["code"]
            line = text.count("\n", 0, match.start("code"))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                if match["kind"] == "console":
                    command(code)
                else:
                    if named := re.match(r"# (\w+\.py)\n", code):
                        Path(named[1]).write_text(code, encoding="utf-8")
                    exec(compile("\n" * line + code, name, "exec"), names)
            yield Block(code, match["output"] or "", printed.getvalue())
    finally:
        names.clear()  # functions refer to them, and they to schedules


def command(lines: str) -> None:
    """Run commands, as a shell does. Raises RuntimeError if one fails."""
    from autosched.cli import main as autosched

    for line in lines.splitlines():
        if autosched(shlex.split(line.removeprefix("$ autosched "))):
            raise RuntimeError(f"the command failed: {line}")


def updated(text: str, blocks: Iterator[Block]) -> str:
    """Return the text of a page with the actual output of its blocks where it differs."""

    def block(match: re.Match[str]) -> str:
        made = next(blocks)
        if made.holds:
            return match[0]
        return f"```{match['kind']}\n{made.code}```\n" + (
            f"\n```text\n{made.printed}```\n" if made.printed else ""
        )

    return BLOCK.sub(block, text)


@contextlib.contextmanager
def in_empty_folder() -> Iterator[None]:
    """Change to an empty folder, because pages write files."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def cells() -> Iterator[tuple[str, str]]:
    """Yield the cells of the tutorial's notebook as (kind, text), without outputs.

    Code cells show the pictures.
    """
    text = re.sub(r"\n```text\n.*?```\n", "", TUTORIAL.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"!\[.*?\]\(pictures/(.*?)\)\n", r'```python\nSVG("\1")\n```\n', text)
    text = text.replace("```python\n", "```python\nfrom IPython.display import SVG\n", 1)
    for i, part in enumerate(re.split(r"```python\n(.*?)```\n", text, flags=re.DOTALL)):
        if part.strip():
            yield "code" if i % 2 else "markdown", part.strip()


def make_notebook() -> str:
    """Return the tutorial as a notebook that has run."""
    import nbclient
    import nbformat

    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    made = [make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(cells())]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel})
    nbclient.NotebookClient(notebook, record_timing=False).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without warnings that this computer is busy
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return str(nbformat.writes(notebook)) + "\n"


def main() -> int:
    """Bring all pages up to date."""
    parser = argparse.ArgumentParser(
        description="Run the code in the documents and update its output in them."
    )
    parser.add_argument(
        "--notebook", action="store_true", help="also run the tutorial as a notebook"
    )
    options = parser.parse_args()
    for path in pages():
        text = path.read_text(encoding="utf-8")
        with in_empty_folder():
            new = updated(text, run(text, path.name))
            if new != text:  # the lines that messages name may have moved
                new = updated(new, run(new, path.name))
            for picture in sorted(Path().glob("*.svg")):
                PICTURES.mkdir(exist_ok=True)
                (PICTURES / picture.name).write_bytes(picture.read_bytes())
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path}")
    if options.notebook:
        with in_empty_folder():
            made = make_notebook()
        NOTEBOOK.write_text(made, encoding="utf-8")
        print(f"wrote {NOTEBOOK}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
