"""All there is to run on a GPU, in parts of at most nine minutes: ``make gpu``.

Tests come first, slow parts last. Each part is a process of its own, whose output also goes to a
log, and the next one runs even if it fails or runs out of time. After each part all logs and
results are in one tar.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = ("benchmarks/gpu",)
MOST = 540  # seconds of a part
GRACE = 10  # seconds for tracebacks, before a part that is out of time is killed
NETWORKS = ("Inception-v3", "GoogLeNet", "NASNet-like", "random-wired")
REHEARSED = (*BENCHMARKS, "--only", "inference", "--rehearse")  # which has one small network
SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # so SIGABRT prints where each thread is
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # or streams share hardware queues
}


class Part(NamedTuple):
    """A process: what follows ``python``, its limit in seconds, and what a rehearsal runs."""

    name: str
    command: tuple[str, ...]
    limit: int
    rehearsal: tuple[str, ...]

    def asked(self, rehearse: bool, folder: Path) -> tuple[str, ...]:
        """Return what follows ``python``."""
        if not rehearse:
            return self.command
        writes = ("--write", "--results", str(folder / "results"))
        return (*self.rehearsal, *(writes if "--only" in self.rehearsal else ()))


def _tests(marks: str, *rehearsed: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfEs", "--durations=10")
    return (*pytest, "-m", marks, "tests"), (*pytest, "-m", "not slow", *rehearsed)


def _probes() -> Part:
    asked = (*BENCHMARKS, "--probe")
    return Part("probes", asked, 420, (*asked, "--rehearse", "--played"))


def _report(name: str, limit: int, *played: str) -> Part:
    asked = (*BENCHMARKS, "--only", name)
    return Part(name, (*asked, "--write"), limit, (*asked, "--rehearse", *played))


def _network(name: str) -> Part:
    asked = (*BENCHMARKS, "--only", "inference", "--case", name, "--leave-out", "torch.compile")
    return Part(f"inference-{name}", (*asked, "--write"), MOST, REHEARSED)


def _compiled() -> Part:
    """Return the case with torch.compile, whose figures are not recorded with the others."""
    asked = (*BENCHMARKS, "--only", "inference", "--case", "GoogLeNet")
    return Part("torch.compile", (*asked, "--quick"), MOST, REHEARSED)


def _parts() -> Iterable[Part]:
    played = "tests/gpu/test_on_gpu.py"
    quick, quick_played = _tests("(cuda or multigpu) and not slow", played, "-k", "played")
    slow, slow_played = _tests("(cuda or multigpu) and slow", played, "-k", "wait")
    yield _probes()
    yield Part("tests", quick, MOST, quick_played)
    yield _report("issue", 180, "--played")
    yield _report("chapter", 240, "--played")
    yield _report("offload", 240, "--played")
    yield _report("steps", 240)
    yield _report("ranks", 360, "--played")
    yield from map(_network, NETWORKS)
    yield Part("sanitizers", slow, MOST, slow_played)
    yield _compiled()


PARTS = {part.name: part for part in _parts()}


class End(NamedTuple):
    """How a part ended."""

    name: str
    seconds: float
    words: str  # empty, if all was well

    def __str__(self) -> str:
        return f"{self.name:24} {self.seconds:6.0f} s  {self.words or 'passed'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts in order; return 1 if one failed."""
    chosen = _options().parse_args(arguments)
    folder: Path = chosen.out.resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    ends = []
    for part in (PARTS[name] for name in chosen.parts or PARTS):
        log = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}_{part.name}.log"
        ends.append(run(part.name, part.asked(chosen.rehearse, folder), part.limit, log))
        print(f"== {ends[-1]}", flush=True)
        pack(folder, () if chosen.rehearse else (RESULTS,))
    print("\n".join(["", *map(str, ends), f"all logs and results: {folder / 'gpu.tar.gz'}"]))
    return 1 if any(end.words for end in ends) else 0


def run(name: str, command: Sequence[str], limit: float, log: Path) -> End:
    """Run a part; what it prints is printed, and is in the log."""
    print(f"\n== {name}: python {' '.join(command)}  (at most {limit:g} s)", flush=True)
    start = time.monotonic()
    with log.open("wb") as file:
        part = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment(os.environ),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _followed(part, log, start + limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)  # and what it has started
            part.wait()
    return End(name, time.monotonic() - start, _in_words(code, limit))


def _followed(part: subprocess.Popen[bytes], log: Path, end: float) -> int | None:
    """Print a part's log until it ends, and return its status; None if it was out of time."""
    with log.open("rb") as printed:
        code, late = None, False
        while code is None and not late:
            code, late = part.poll(), time.monotonic() > end
            _show(printed.read())
            time.sleep(0.05)
        if code is None:
            part.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                part.wait(GRACE)
            _show(printed.read())
    return code


def _show(text: bytes) -> None:
    if text:
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def _in_words(code: int | None, limit: float) -> str:
    if code is None:
        return f"FAILED: not done in {limit:g} s"
    if code < 0:
        return f"FAILED: ended by {signal.Signals(-code).name}"
    return f"FAILED: status {code}" if code else ""


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a part; what the caller has set is kept."""
    paths = filter(None, [str(ROOT), given.get("PYTHONPATH")])
    return {**SETTINGS, **given, "PYTHONPATH": os.pathsep.join(paths)}


def pack(folder: Path, others: Iterable[Path]) -> None:
    """Put logs and results, and the GPU's results of other folders, into one tar."""
    made = folder / "gpu.tar.gz"
    with tarfile.open(made, "w:gz") as tar:
        for name in ("logs", "results"):
            if (folder / name).exists():
                tar.add(folder / name, name)
        for other in others:
            for path in sorted(other.glob("gpu*")):
                tar.add(path, f"results/{path.name}")


def _options() -> ArgumentParser:
    options = ArgumentParser(description=__doc__)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    options.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="the folder for logs and the tar"
    )
    options.add_argument(
        "--rehearse", action="store_true", help="run all of it in small, on simulated GPUs"
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
