"""Programs that torchrun starts: they end by themselves, with the right exit codes, also after a restart."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

FAILING = """
import os, signal, sys, time, torch
import autosched as asc

def second(x):
    if first_attempt and runs[0] == 2:
        {how}
    return x + 1

runs = [0]
first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
machine = asc.Machine.cluster()
graph = asc.Graph("step")
with graph.on("cpu:0"):
    a = graph.input("x") * 2
with graph.on("cpu:1"):
    b = graph.add(second, a)
with graph.on("cpu:0"):
    graph.output(y=b * 3)
schedule = asc.schedule(graph, machine)
for runs[0] in range(4):
    found = schedule(**{{name: torch.ones(2) for name in schedule.inputs_here}})
line = " ".join(map(str, ["rank", machine.rank, "ended with", *(y.tolist() for y in found.values())]))
os.write(1, (line + "\\n").encode())  # at once: both write to one pipe
"""


def torchrun(
    script: Path, *options: str, args: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *options, str(script), *args],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_example_runs():
    done = torchrun(ROOT / "examples" / "train_hosts.py")
    assert done.returncode == 0, done.stderr
    assert "parameters equal the serial ones, bit for bit: holds" in done.stdout


def test_the_example_of_the_readme_runs_unchanged(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```py\n(.*?)```", text, re.DOTALL))
    script = tmp_path / "train.py"
    line = "import os; os.write(1, f'{float(loss)}\\n'.encode())  # at once"
    script.write_text(f"{block}{line}\n")
    done = torchrun(script)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert float(first) == float(second) > 0


def test_a_task_that_raises_ends_all_ranks(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(how="raise ValueError('of a test')"))
    done = torchrun(script)
    assert done.returncode == 1
    assert "TaskError: task 'second' on cpu:1 failed: ValueError: of a test" in done.stderr
    assert "Aborted" not in done.stderr


@pytest.mark.parametrize("attempt", range(3))
def test_torchrun_restarts_the_ranks_after_one_was_killed(tmp_path, attempt):
    script = tmp_path / "killed.py"
    script.write_text(FAILING.format(how="os.kill(os.getpid(), signal.SIGKILL)"))
    done = torchrun(script, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ended with [9.0, 9.0]", "rank 1 ended with"]


def test_training_goes_on_from_the_last_checkpoint(tmp_path):
    """It is started again, and the loss of the last checkpoint would not be that of one process."""
    folder = tmp_path / "checkpoints"
    args = ["--folder", str(folder), "--kill-at", "17"]
    done = torchrun(ROOT / "examples" / "train_restart.py", "--max-restarts=1", args=args)
    assert done.returncode == 0, done.stderr
    assert "parameters equal those of one process, bit for bit: holds" in done.stdout
    # torchrun shows the first process that it finds ended: the killed one, or the one that was told.
    assert "exitcode: -9" in done.stderr or "rank 1 has gone: its process" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["10", "20", "30"]


def start(script: Path, rank: int, port: int) -> subprocess.Popen[str]:
    """Start one of two processes without torchrun: rank 0 has the store."""
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    names |= {"RANK": str(rank), "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": "0"}
    names |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    return subprocess.Popen(command, env=os.environ | names, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("how", "codes", "told"),
    [
        ("raise ValueError('of a test')", [1, 1], "TaskError: rank 1: task 'second' on cpu:1 rais"),
        ("os.kill(os.getpid(), signal.SIGKILL)", [1, -9], "RankError: rank 1 has gone"),
        ("os.kill(os.getpid(), 2); time.sleep(1)", [1, -2], "RankError: rank 1 was interrupted"),
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_processes_end_with_the_right_exit_codes(tmp_path, victim, how, codes, told):
    """Also where rank 0 fails, whose process has the store."""
    devices = (
        {"cpu:0": "cpu:0", "cpu:1": "cpu:1"} if victim else {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}
    )
    script = tmp_path / "failing.py"
    lines = FAILING.format(how=how)
    script.write_text(re.sub("cpu:[01]", lambda found: devices[found[0]], lines))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(script, rank, port) for rank in (0, 1)]
    try:
        _, errors = ranks[1 - victim].communicate(timeout=60)
        assert re.sub(r"\b1\b", str(victim), told) in errors
        assert ranks[1 - victim].returncode == codes[0]
        assert ranks[victim].wait(60) == codes[1]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
