"""All that runs on a GPU, in parts: each ends in time, and the next one runs; and the probes."""

from __future__ import annotations

import subprocess
import sys
import tarfile

import pytest
import torch

from autosched.simulated_gpus import playing
from tests.benchmarks.conftest import FOLDER

# ---- parts


def test_tests_come_first_and_slow_parts_last_and_each_has_nine_minutes_at_most(bench):
    parts = bench.sequence.PARTS
    assert [*parts][:2] == ["probes", "tests"]
    assert [*parts][-2:] == ["sanitizers", "torch.compile"]
    assert all(part.limit <= 540 for part in parts.values())
    assert "(cuda or multigpu) and not slow" in parts["tests"].command
    reports = [part for part in parts.values() if "--write" in part.command]
    assert {part.command[part.command.index("--only") + 1] for part in reports} == {
        *bench.script["REPORTS"]
    }


def test_a_part_that_fails_keeps_no_other_from_running(bench, capsys, monkeypatch, tmp_path):
    part = bench.sequence.Part
    shows = "import os; print('queues', os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    parts = {
        "bad": part("bad", ("-c", "raise ValueError('out of luck')"), 60, ()),
        "crashes": part("crashes", ("-c", "import os; os.abort()"), 60, ()),
        "good": part("good", ("-c", shows), 60, ()),
    }
    monkeypatch.setattr(bench.sequence, "PARTS", parts)
    monkeypatch.setattr(bench.sequence, "RESULTS", tmp_path / "none")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert bench.sequence.main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "Traceback" in printed
    assert "ValueError: out of luck" in printed
    assert "FAILED: status 1" in printed
    assert "FAILED: ended by SIGABRT" in printed
    assert "queues 32" in printed
    with tarfile.open(tmp_path / "gpu.tar.gz") as tar:
        logs = [name for name in tar.getnames() if name.endswith(".log")]
    assert len(logs) == 3
    assert bench.sequence.main(["--out", str(tmp_path), "good"]) == 0


@pytest.mark.slow
def test_a_rehearsal_runs_the_whole_sequence(bench, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / "sequence.py", "--rehearse", "--out", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed\n") >= len(bench.sequence.PARTS)
    found = {path.name for path in (tmp_path / "results").glob("gpu_*.json")}
    assert found == {f"gpu_{name}.json" for name in bench.script["REPORTS"]}


# ---- probes


@pytest.mark.parametrize(
    "name", ["handles", "workspaces", "failed captures", "generators", "clocks", "launches"]
)
def test_a_simulated_gpu_answers_each_question(bench, monkeypatch, name):
    assert name in bench.probes.PROBES
    monkeypatch.setattr(sys.modules["issue"], "BLOCKS", 2)
    monkeypatch.setattr(sys.modules["issue"], "BLOCK", 2)
    with playing(gpus=2, seed=1):
        finding = bench.probes.PROBES[name].ask(bench.rig(rehearse=True))
    assert finding.observation
    assert finding.meaning
    assert "nothing was replayed" not in finding.observation


def test_a_handle_that_cannot_be_created_in_a_capture_is_observed(bench, monkeypatch):
    plain = torch.mm

    def mm(*args):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")
        return plain(*args)

    monkeypatch.setattr(torch, "mm", mm)
    with playing(gpus=2, seed=1):
        finding = bench.probes.PROBES["handles"].ask(bench.rig(rehearse=True))
    assert "cublasCreate" in finding.observation
    assert "before it captures" in finding.meaning
