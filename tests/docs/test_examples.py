"""The examples run, print what they promise, and notice when a promise is broken."""

import argparse
import gzip
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosched as asc

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "automatic_parallelism.py"

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
"""

SECONDS = r"\d+\.\d{3} ± \d+\.\d{3} +\d+\.\d{3}"  # measured and predicted

GPU_COUNTS = rf"""
 +sec/epoch +predicted +speed-up +test accuracy
1 GPU  +{SECONDS} +1\.00 +0\.9\d+
2 GPUs +{SECONDS} +\d+\.\d\d +0\.9\d+
    test accuracy above 0\.85: holds
    [\d,]+ parameters after 20 steps equal the serial ones, bit for bit: holds
"""

RESNET50 = rf"""
stage 0 on .*: conv1 .* MB to the next
stage 1 on .*: .* mse_loss, .* ms
order +images in a split +predicted +idle
gpipe +10 +0\.\d+ +\d+\.\d%
 +sec/batch +predicted +speed-up +predicted
one GPU +{SECONDS} +1\.00 +1\.00
cut in two +{SECONDS} +\d\.\d\d +0\.9\d
pipelined by hand +{SECONDS} +\d\.\d\d +1\.\d\d
autosched +{SECONDS} +\d\.\d\d +1\.\d\d
    autosched is predicted to gain 54%: holds
    cut in two trains as one GPU, bit for bit: holds
    pipelined trains as split after split, but for rounding: holds
images in a split +sec/batch +predicted
20 +{SECONDS}
"""

STRATEGIES = rf"""
4 batches of 256 +MB/batch +sec/batch +predicted +loss
sum on one GPU +\d+\.\d\d +{SECONDS} +\d\.\d+
sum on the CPU +\d+\.\d\d +{SECONDS} +\d\.\d+
ring +\d+\.\d\d +{SECONDS} +\d\.\d+
.*
the largest 1% +\d+\.\d\d +{SECONDS} +\d\.\d+
ring, every 4 batches +\d+\.\d\d +{SECONDS} +\d\.\d+
    another order changes the loss by less than 0\.001: holds
    8 bits send less than a ring, and so does 1%: holds
    all losses fall from \d\.\d+: holds
"""

SERVING = r"""
1 in flight: \d+\.\d requests/s; answers equal the model's: True
3 in flight: \d+\.\d requests/s; answers equal the model's: True
    \d\.\d\d times as many
"""


@pytest.mark.parametrize(
    ("script", "lines", "pictures"),
    [
        ("serve_two_devices", SERVING, []),
        pytest.param(
            "automatic_parallelism",
            LINES,
            ["cpu_gpu_and_copies", "run_and_copy"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "multi_gpu_lenet", GPU_COUNTS, ["lenet_epochs", "lenet_step"], marks=pytest.mark.slow
        ),
        pytest.param(
            "multi_gpu_resnet18",
            GPU_COUNTS,
            ["resnet18_epochs", "resnet18_step"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "model_parallel_resnet50",
            RESNET50,
            ["resnet50_splits", "resnet50_step", "resnet50_ways"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "communication_strategies",
            STRATEGIES,
            ["communication_seconds"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_example_runs_and_prints_its_lines_in_order(script, lines, pictures, tmp_path):
    command = [
        sys.executable,
        str(EXAMPLES / f"{script}.py"),
        "--quick",
        "--folder",
        str(tmp_path / "pictures"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = iter(done.stdout.splitlines())
    for line in lines.strip("\n").splitlines():
        assert any(re.fullmatch(line, candidate) for candidate in printed), (
            f"no {line!r} in\n{done.stdout}"
        )
    assert sorted(path.stem for path in tmp_path.glob("pictures/*.svg")) == pictures


@pytest.mark.parametrize(("together", "holds"), [(0.32, True), (0.34, True), (0.36, False)])
def test_what_takes_longer_than_its_parts_does_not_hold(capsys, together, holds):
    assert runpy.run_path(str(SCRIPT))["at_once"]("two GPUs", together, [0.30, 0.32]) is holds
    assert capsys.readouterr().out.endswith(
        "at most 1.1: holds\n" if holds else "at most 1.1: does NOT hold\n"
    )


def test_a_run_that_differs_from_the_serial_one_is_noticed(capsys, monkeypatch):
    serial = asc.Graph.run_serial
    monkeypatch.setattr(asc.Graph, "run_serial", lambda graph, x: serial(graph, x=x + 1))
    options = argparse.Namespace(products=2)
    assert not runpy.run_path(str(SCRIPT))["tangled_dependencies"](options)
    assert "2 runs: NOT equal to serial" in capsys.readouterr().out


@pytest.fixture
def example(monkeypatch):
    """Import an example, or what they share, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def linear():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("least", "code"), [pytest.param(0.0, 0, marks=pytest.mark.slow), (1.0, 1)]
)
def test_a_network_that_learns_too_little_is_noticed(example, capsys, least, code):
    book, options = example("book"), argparse.Namespace(quick=True, folder=None)
    assert book.compare_gpu_counts("linear", linear, book.digits(8), 256, 2, least, options) == code
    assert (
        f"test accuracy above {least}: {'does NOT hold' if code else 'holds'}"
        in capsys.readouterr().out
    )


def test_training_that_differs_from_the_serial_one_is_noticed(example, capsys, monkeypatch):
    book = example("book")
    right = book.serial_step
    monkeypatch.setattr(book, "serial_step", lambda *given, parts: right(*given, parts=1))
    machine, _ = book.machine_with(2, slow=1)
    assert not book.equal_to_serial(
        linear, torch.nn.functional.cross_entropy, machine, book.digits(8), 128
    )
    assert "bit for bit (1.weight, 1.bias differ): does NOT hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, []),
        ({"autosched": {"predicted": 0.7}}, ["autosched is predicted to gain 54%"]),
        (
            {"cut in two": {"model": torch.nn.Linear(2, 1)}},
            ["cut in two trains as one GPU, bit for bit"],
        ),
        (
            {"pipelined by hand": {"model": torch.nn.Linear(2, 1)}},
            ["pipelined trains as split after split, but for rounding"],
        ),
    ],
)
def test_a_broken_promise_of_the_pipeline_is_noticed(example, capsys, changed, broken):
    resnet50, book = example("model_parallel_resnet50"), example("book")
    model = torch.nn.Linear(2, 1)
    right = resnet50.Result(book.Seconds(1.0, 0.0), 1.0, "gpipe", model)
    results = dict.fromkeys(["one GPU", "cut in two", "pipelined by hand"], right) | {
        "autosched": right._replace(predicted=0.6)
    }
    results = {name: found._replace(**changed.get(name, {})) for name, found in results.items()}
    assert resnet50.promises(results, model) is not bool(broken)
    assert re.findall("    (.*): does NOT hold", capsys.readouterr().out) == broken


@pytest.mark.parametrize(
    ("name", "change", "broken"),
    [
        ("ring", {}, []),
        ("sum on the CPU", {"loss": 1.002}, ["another order changes the loss by less than 0.001"]),
        ("8 bits", {"nbytes": 11.0}, ["8 bits send less than a ring, and so does 1%"]),
        ("the largest 1%", {"loss": 2.5}, ["all losses fall from 2.3000"]),
    ],
)
def test_a_broken_promise_of_communication_is_noticed(example, capsys, name, change, broken):
    ways, book = example("communication_strategies"), example("book")
    results = {
        way: ways.Result(10.0, book.Seconds(1.0, 0.0), 1.0, 1.0)
        for way in {**ways.EXACT, **ways.RARE}
    }
    results |= {way: ways.Result(5.0, book.Seconds(1.0, 0.0), 1.0, 1.2) for way in ways.LOSSY}
    results[name] = results[name]._replace(**change)
    assert ways.promises(results, 2.3) is not bool(broken)
    assert re.findall("    (.*): does NOT hold", capsys.readouterr().out) == broken


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_read_from_its_files(example, packed, tmp_path):
    book = example("book")
    for part, count in (("train", 3), ("t10k", 2)):
        images = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 2, 0, 0, 0, 1, *range(2 * count)])
        labels = bytes([0, 0, 8, 1, 0, 0, 0, count, *range(count)])
        for kind, data in (("images-idx3", images), ("labels-idx1", labels)):
            path = tmp_path / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    found = book.fashion_mnist(tmp_path)
    assert torch.equal(found.x, torch.arange(6.0).reshape(3, 1, 2, 1) / 255)
    assert found.y.tolist() == [0, 1, 2]
    assert (found.test_x.shape, found.test_y.tolist()) == ((2, 1, 2, 1), [0, 1])


def test_a_file_that_is_no_idx_file_is_named(example, tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"<html>")
    with pytest.raises(SystemExit, match="train-images-idx3-ubyte is no idx file of bytes"):
        example("book").fashion_mnist(tmp_path)
