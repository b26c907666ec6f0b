"""Runs in flight where Python is used otherwise: at its exit, in threads, in notebooks."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

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
