"""The command plan: what fits, what takes the memory, and that predicted peaks are those of runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched import cli
from autosched.cli.plan import rows_of, ways_of
from autosched.frontends import capture
from autosched.simulated_gpus import playing

JOBS = """
import torch
from torch import nn

def job(optimizer=torch.optim.AdamW, rows=512):
    layers = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers)
    assert model[0].weight.is_meta
    batch = torch.randn(rows, 256), torch.randn(rows, 256)
    return model, nn.MSELoss(), optimizer(model.parameters()), batch

def step():
    model, loss, optimizer, batch = job()
    def step(x, y):
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step, batch

def wrong():
    return 3

def failing():
    model, loss, optimizer, (x, y) = job()
    return model, loss, optimizer, (x, y[:, :3])
"""
PARAMETERS = 2 * (256 * 256 + 256) * 4


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    path = tmp_path / "jobs.py"
    path.write_text(JOBS, encoding="utf-8")
    return str(path)


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_what_fits_and_what_takes_the_memory(jobs: str, capsys: Any) -> None:
    found = rows(capsys, f"{jobs}:job", "--gpus", "1", "2")
    assert [(row["gpus"], row["how"]) for row in found] == [
        (1, "alone"),
        (2, "data parallel"),
        (2, "pipeline"),
    ]
    for row in found:
        assert row["fits"]
        assert row["peak"] == row["parameters"] + row["optimizer"] + row["other"]
        assert 0 < row["bound"] <= row["seconds"] * (1 + 1e-9)
    one, two, _ = found
    assert (one["parameters"], one["optimizer"]) == (PARAMETERS, 2 * PARAMETERS)
    assert two["other"] < one["other"]
    limits = (one["peak"] + two["peak"]) / 2, one["parameters"] + one["optimizer"]
    (less,), (least,) = (
        rows(capsys, f"{jobs}:job", "--gpus", "1", "--memory", f"{limit / 1e6:.6f}MB")
        for limit in limits
    )
    assert less["fits"], "operators are repeated"
    assert less["peak"] <= limits[0]
    assert not least["fits"]
    assert least["peak"] == one["peak"]
    assert "A plan exists with" in least["advice"]


def test_it_prints_a_table(jobs: str, capsys: Any) -> None:
    assert cli.main(["plan", f"{jobs}:step", "--gpus", "1", "--memory", "80GiB"]) == 0
    heads, row, *_ = capsys.readouterr().out.splitlines()
    assert heads.split() == "GPUs how fits peak parameters optimizer other step at least".split()
    assert row.split()[:3] == ["1", "compile", "yes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wrong"], "must return (step, arguments) or (model, loss, optimizer, batch), got 'int'"),
        (["failing"], "the step failed on torch's device meta"),
        (["job", "--memory", "much"], "must be bytes such as 24GB or 80GiB, got 'much'"),
        (["job", "--gpus", "0"], "must be from 1 to 256, got 0"),
    ],
)
def test_wrong_input_is_said(jobs: str, capsys: Any, arguments: list[str], message: str) -> None:
    function, *options = arguments
    with pytest.raises(SystemExit) if options else contextlib.nullcontext():
        assert cli.main(["plan", f"{jobs}:{function}", *options]) == 2
    assert message in capsys.readouterr().err


def test_peaks_are_those_of_a_played_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
        layers = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, [torch.ones(256, 128)]

    with torch.device("meta"):
        given = job()
    (row,) = rows_of(ways_of(given, "training"), asc.Machine.emulated(gpus=1))
    monkeypatch.setattr(capture, "check_modes", lambda: None)
    with playing(gpus=1):
        # Copies of a model in host memory would be allocated whenever a thread issues them.
        with torch.device("cuda"):
            step, (x,) = job()
        with asc.compile(step, asc.Machine.local(), place={"*": "cuda:0"}) as run:
            run(x)
            run(x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            run(x)
            torch.cuda.synchronize()
            measured = torch.cuda.max_memory_allocated()
    assert row.peak == pytest.approx(measured, rel=0.005)  # blocks are rounded up to 512 bytes
