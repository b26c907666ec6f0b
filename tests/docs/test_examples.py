"""The examples run, print what they promise, and notice when a promise is broken."""

import gzip
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

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
0 +cuda:0 +conv1 \.\.\. .* ms +.* [kM]B
1 +cuda:1 +.* \.\.\. mse_loss +.* ms +-
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "lines", "pictures"),
    [
        ("serve_two_devices", SERVING, []),
        ("automatic_parallelism", LINES, ["cpu_gpu_and_copies", "run_and_copy"]),
        ("multi_gpu_lenet", GPU_COUNTS, ["lenet_epochs", "lenet_step"]),
        ("multi_gpu_resnet18", GPU_COUNTS, ["resnet18_epochs", "resnet18_step"]),
        (
            "model_parallel_resnet50",
            RESNET50,
            ["resnet50_splits", "resnet50_step", "resnet50_ways"],
        ),
        ("communication_strategies", STRATEGIES, ["communication_seconds"]),
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


@pytest.fixture
def example(monkeypatch):
    """Import an example, or what they share, by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


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
