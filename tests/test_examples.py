"""The examples run, print what they promise, and notice when a promise is broken."""

import argparse
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import autosched as asc

SCRIPT = Path(__file__).parent.parent / "examples" / "automatic_parallelism.py"

LINES = r"""
GPU1 time: \d+\.\d{4} sec
GPU2 time: \d+\.\d{4} sec
GPU1 & GPU2: \d+\.\d{4} sec
Run on GPU1: \d+\.\d{4} sec
Copy to CPU: \d+\.\d{4} sec
Run on GPU1 and copy to CPU: \d+\.\d{4} sec
    computing and copying take \d\.\d{3} times what the longer one takes alone; at most 1\.1: .*
1 GPU: \d+\.\d{4} sec
2 GPUs: \d+\.\d{4} sec
    8 on .*: \d\.\d{4} sec predicted
    4 on .*, 4 on .*: \d\.\d{4} sec predicted
this computer has \d+ cores, .*
\d+ sorts of 10,000 numbers on 1 stream: \d+\.\d{4} sec
\d+ sorts of 10,000 numbers on \d+ streams: \d+\.\d{4} sec
makespan .*, \d+% of copy time hidden behind compute
    predicted: .* ms, 100% hidden
    8 runs: equal to serial, bit for bit
""".strip().splitlines()


def test_the_chapter_runs_and_prints_its_lines_in_order(tmp_path):
    command = [sys.executable, str(SCRIPT), "--quick", "--folder", str(tmp_path / "pictures")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.splitlines())
    for line in LINES:
        assert any(re.fullmatch(line, candidate) for candidate in printed), f"no {line!r} in\n{done.stdout}"
    assert {path.name for path in tmp_path.glob("pictures/*")} == {"run_and_copy.svg", "cpu_gpu_and_copies.svg"}


@pytest.mark.parametrize(("together", "holds"), [(0.32, True), (0.34, True), (0.36, False)])
def test_what_takes_longer_than_its_parts_does_not_hold(capsys, together, holds):
    assert runpy.run_path(str(SCRIPT))["at_once"]("two GPUs", together, [0.30, 0.32]) is holds
    assert capsys.readouterr().out.endswith("at most 1.1: holds\n" if holds else "at most 1.1: does NOT hold\n")


def test_a_run_that_differs_from_the_serial_one_is_noticed(capsys, monkeypatch):
    serial = asc.Graph.run_serial
    monkeypatch.setattr(asc.Graph, "run_serial", lambda graph, x: serial(graph, x=x + 1))
    options = argparse.Namespace(products=2)
    assert not runpy.run_path(str(SCRIPT))["tangled_dependencies"](options)
    assert "2 runs: NOT equal to serial" in capsys.readouterr().out
