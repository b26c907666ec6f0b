"""The ways to use the sanitizer: function, with statement, command, and pytest fixture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosched as asc
from autosched.cli import main
from autosched.simulated_gpus import playing

RACE = """
import sys
import torch

def race():
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.synchronize()

def fine():
    torch.ones(3, device="cuda")

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    (race if "race" in sys.argv else fine)()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streams.py").write_text(RACE, encoding="utf-8")
    return "streams.py"


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["streams.py", "race"], 1, "race: x: the default stream"),
        (["--gpus", "2", "streams.py", "other"], 0, "no findings in"),
        (["streams.py:race"], 1, "streams.py:8, in race"),
        (["streams.py:fine"], 0, "no findings in"),
    ],
)
def test_the_command(
    arguments: list[str], code: int, printed: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sanitize", *arguments]) == code
    assert printed in capsys.readouterr().out
    assert torch.cuda.device_count() == 0


def test_the_command_prints_json(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sanitize", "--json", script, "race", "2"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"][0]["kind"] == "race"
    assert "arguments ['race', '2']" in captured.err


def test_wrong_usage_of_the_command(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sanitize", "nowhere.py"]) == 2
    assert main(["sanitize", "streams.py:fine", "argument"]) == 2
    assert "no such file" in capsys.readouterr().err


TESTS = """
import torch

def test_without_it():
    assert torch.cuda.device_count() == 0

def test_race(sanitized_cuda):
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x + 1

def test_fine(sanitized_cuda):
    assert torch.cuda.device_count() == 1
    torch.ones(3, device="cuda")
"""


def test_the_fixture_fails_tests_with_findings(tmp_path: Path) -> None:
    (tmp_path / "test_streams.py").write_text(TESTS, encoding="utf-8")
    run = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_autosched", "-q"]
    root = str(Path(__file__).parents[2])  # whether it is installed or not
    own = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [*run, str(tmp_path)], check=False, capture_output=True, text=True, cwd=tmp_path, env=own
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_streams.py::test_race" in done.stdout
    assert "race: x: the default stream" in done.stdout


def test_the_plugin_imports_nothing_of_torch_or_ours() -> None:
    code = "import sys, pytest_autosched; print({'torch', 'autosched', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_statement_has_the_report() -> None:
    with asc.testing.simulated_gpus(2) as gpus:
        x = torch.ones(3, device="cuda:1")
        torch.cuda.Stream("cuda:1").wait_stream(torch.cuda.current_stream("cuda:1"))
        del x
    assert not gpus.report.findings
    assert gpus.report.operations == 1


def test_numbers_tell_whether_results_change_in_another_order() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        y = torch.zeros(3, device="cuda")
        with torch.cuda.stream(side):
            torch.cuda._sleep(1)
            y.copy_(x.cuda(non_blocking=True))
        return y + 1

    report = asc.sanitize(step, torch.ones(3), numbers=True)
    assert report.result is not None
    assert not any("no order" in finding.outcome for finding in report.findings)
    assert report.findings

    def harmless(x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        y = torch.ones(3, device="cuda")
        with torch.cuda.stream(side):
            z = y * 2
        torch.cuda.synchronize()
        del z
        return y

    def read_too_early(x: torch.Tensor) -> list[int]:
        return [int(n) for n in x.cuda().argmax(-1).to("cpu", non_blocking=True)]

    (first,) = asc.sanitize(read_too_early, torch.eye(3), numbers=True).findings
    assert "the results differ" in first.outcome

    (first, *_) = asc.sanitize(harmless, torch.ones(3), numbers=True).findings
    assert "no order of 12 that were tried changed a number" in first.outcome


def test_arguments_are_not_changed_by_other_orders() -> None:
    x = torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        side, y = torch.cuda.Stream(), x.cuda(non_blocking=True)
        with torch.cuda.stream(side):
            return y + 1

    asc.sanitize(step, x, numbers=True)
    assert x.tolist() == [2.0] * 3


def test_a_finding_is_drawn_with_the_missing_order_in_red() -> None:
    def step() -> None:
        x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        x.add_(1)
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.synchronize()
        del y

    report = asc.sanitize(step)
    drawn = report.svg()
    assert drawn.count("#d1242f") == 2
    assert "stream side of cuda:0" in drawn
    assert all(name in drawn for name in ("add_", "ones"))
    with pytest.raises(IndexError):
        report.svg(len(report.findings))


def test_what_is_found_shows_in_some_order() -> None:
    """The simulated adversary agrees: what has a race goes wrong for some seed, what has none for no seed."""

    def step(waits: bool) -> list[float]:
        side, x = torch.cuda.Stream(), torch.full((3,), 2.0, device="cuda")
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return y.tolist()

    for waits in (True, False):
        outcomes = []
        for seed in range(20):
            with playing(1, seed) as gpus:
                outcomes.append(step(waits))
                gpus.faults.clear()
        wrong = any(found != [3.0] * 3 for found in outcomes)
        assert wrong is bool(asc.sanitize(step, waits, numbers=True).findings) is not waits
