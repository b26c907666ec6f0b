"""All that runs on a GPU, in parts: each ends in time, and the next one runs; and the probes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks.conftest import FOLDER
from tests.gpu.fake_gpu import playing

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


def test_each_network_has_a_part(bench):
    assert {*bench.sequence.NETWORKS} == {*sys.modules["networks"].NETWORKS}


def test_the_readme_states_the_limit_of_each_part_in_order(bench):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [f"| `{part.name}` | {part.limit // 60} min |" for part in bench.sequence.PARTS.values()]
    at = [text.index(row) for row in rows]
    assert at == sorted(at)


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


def test_a_part_that_is_out_of_time_says_where_it_is_and_ends(bench, tmp_path):
    log = tmp_path / "log"
    end = bench.sequence.run(
        "stuck", ("-c", "def stuck():\n import time\n time.sleep(600)\nstuck()"), 2, log
    )
    assert end.words == "FAILED: not done in 2 s"
    assert "in stuck" in log.read_text()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_runs_the_sequence():
    told = ["GPU_PYTHON=python3", "GPU_PARTS=probes tests", "GPU_OUT=there"]
    done = subprocess.run(
        ["make", "-n", "gpu", *told],
        cwd=FOLDER.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'benchmarks/gpu/sequence.py --out "there" probes tests' in done.stdout


def test_what_the_caller_has_set_is_kept(bench):
    given = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTHONPATH": "elsewhere"}
    found = bench.sequence.environment(given)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(FOLDER.parent.parent), "elsewhere"]


def test_results_of_the_gpu_alone_are_packed(bench, tmp_path):
    for name in ("gpu_issue.json", "gpu.md", "scale.md"):
        path = tmp_path / "results" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    out = tmp_path / "out"
    out.mkdir()
    bench.sequence.pack(out, [tmp_path / "results"])
    with tarfile.open(out / "gpu.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["results/gpu.md", "results/gpu_issue.json"]


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


def asked(bench, code, limit=60):
    """Ask one question of a process that runs this code."""
    probe = bench.probes.Probe("What now?", None, "nothing works")
    return bench.probes._asked("now", probe, [sys.executable, "-c", code, "--probe"], limit)


def test_a_probe_that_answers_is_printed_with_its_question(bench, capfd):
    assert asked(bench, "import sys; print('observation:', sys.argv[2])")
    printed = capfd.readouterr().out
    assert "now: What now?" in printed
    assert "observation: now" in printed
    assert "nothing works" not in printed


@pytest.mark.parametrize(
    ("code", "limit", "end"),
    [
        ("import os; os.abort()", 60, "ended by SIGABRT"),
        ("1 / 0", 60, "status 1; its traceback is above"),
        ("import time; time.sleep(600)", 1, "no answer in 1 s"),
    ],
)
def test_a_probe_without_an_answer_is_an_observation(bench, capfd, code, limit, end):
    assert not asked(bench, code, limit)
    printed = capfd.readouterr().out
    assert end in printed
    assert "meaning: nothing works" in printed


def test_a_clock_is_steady_from_where_readings_stay_near_the_last(bench):
    assert bench.probes.steady_from([5.0, 4.0, 1.01, 1.0, 1.0], 1.0) == 2
    assert bench.probes.steady_from([1.0, 5.0], 1.0) == 2


def test_clocks_of_all_gpus_are_read_twice_at_least(bench):
    with playing(gpus=2, seed=1):
        assert [count >= 2 for count in bench.rig(rehearse=True).warm_clocks()] == [True, True]
    assert bench.rig(rehearse=True).warm_clocks() == [] or torch.accelerator.is_available()


def test_clocks_are_warm_when_two_readings_agree():
    readings = iter([5.0, 3.0, 1.0, 0.99, 7.0])
    assert sys.modules["_rig"].readings_until_steady(lambda: next(readings)) == 4


# ---- what may spoil other results


def test_who_fails_has_a_traceback(bench, capsys):
    def fails():
        raise ValueError("out of luck")

    _, reasons = bench.contestants.entered(bench.rig(rehearse=True), {"bad": fails})
    assert reasons == {"bad": "failed: ValueError: out of luck"}
    assert "in fails" in capsys.readouterr().err


def test_words_of_a_case_are_whole(bench):
    labels = ["GoogLeNet, batch 1", "GoogLeNet, batch 16", "Inception-v3, batch 1"]
    cases = dict.fromkeys(labels)
    chosen = bench.script["_chosen"]
    assert list(chosen(cases, "batch 1")) == [labels[0], labels[2]]
    assert list(chosen(cases, "googlenet")) == labels[:2]
    assert list(chosen(cases, "")) == labels
    assert list(chosen(cases, "inception")) == labels[2:]


def test_what_a_call_measured_is_kept_when_another_measures_it_again(bench, monkeypatch, tmp_path):
    case = bench.script["Case"]
    reports, seconds = bench.script["REPORTS"], iter([1.0, 2.0])
    module = SimpleNamespace(
        __doc__="", cases=lambda rig: {"it": lambda: case({"a": next(seconds)})}
    )
    monkeypatch.setitem(reports, "chapter", (module, "Twice"))
    for _ in range(2):
        options = ["--rehearse", "--write", "--results", str(tmp_path), "--only", "chapter"]
        assert bench.script["main"](options) == 0
    read = sys.modules["_record"].read_json
    kept = [read(path)[1]["it"].seconds["a"] for path in sorted(tmp_path.glob("gpu_calls/*.json"))]
    assert kept == [1.0, 2.0]
    assert read(tmp_path / "gpu_chapter.json")[1]["it"].seconds["a"] == 2.0


def test_words_that_no_case_has_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.script["main"](["--rehearse", "--only", "issue", "--case", "nothing like it"])
    assert "no case" in capsys.readouterr().err
