"""Runs in flight where Python is used otherwise: at its exit, in threads, in notebooks."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

START = """
    import threading, time
    import autosched as asc

    def slow(x):
        time.sleep(0.05)
        return x + 1

    graph = asc.Graph()
    graph.output(y=graph.add(slow, graph.input("x"), on="cuda:0", seconds=0.05))
    schedule = asc.schedule(graph, asc.Machine.emulated(gpus=1), in_flight=3)
"""
EXIT = """
    import atexit

    def work():
        print(sum(outputs["y"] for outputs in schedule.map(range(4))))

    def late():
        print(schedule.submit(x=9).result()["y"])
        runs.extend(schedule.submit(x=i) for i in range(3))      # nobody waits for these

    schedule(x=1)
    atexit.register(late)
    runs = [schedule.submit(x=i) for i in range(3)]
    other = asc.schedule(graph, asc.Machine.emulated(gpus=1), in_flight=2)
    half = other.map(iter(range(100)))
    next(half)
    threading.Thread(target=work).start()                        # goes on when this has ended
"""


def test_python_ends_with_runs_in_flight():
    code = dedent(START) + dedent(EXIT)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "10\n10\n"), done.stderr
    assert "Error" not in done.stderr


CELLS = {
    "first": START + '    print([run.result()["y"] for run in map(schedule.submit, range(4))])',
    "await": """
        import asyncio

        async def ask(x):
            return (await schedule.submit(x=x))["y"]

        print((await schedule.submit(x=1))["y"], await asyncio.gather(*map(ask, range(5))))
    """,
    "thread": """
        found = []
        work = lambda: found.extend(outputs["y"] for outputs in schedule.map(range(4)))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(found)
    """,
    "interrupt": """
        import os, signal

        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                schedule.submit(x=1).result()
        except KeyboardInterrupt:
            schedule.wait()
        print(schedule(x=1)["y"])
    """,
    "shutdown": "runs = [schedule.submit(x=i) for i in range(3)]",
}
SHOWN = {
    "first": "[1, 2, 3, 4]\n",
    "await": "2 [1, 2, 3, 4, 5]\n",
    "thread": "[1, 2, 3, 4]\n",
    "interrupt": "2\n",
    "shutdown": "",
}


@pytest.mark.slow
def test_a_notebook_can_submit_await_and_be_interrupted():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient
    cells = [nbformat.v4.new_code_cell(dedent(code)) for code in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client(notebook, timeout=60, kernel_name="python3").execute()
    found = {
        name: "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }
    assert found == SHOWN
