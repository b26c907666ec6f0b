"""What a benchmark found: for each case the seconds of each contestant, and what was promised; as JSON and Markdown.

The JSON is the record, and the summary of all is made of it. Cases that were measured earlier on the same machine, with
the same versions, stay in it, so a long benchmark can be run in parts.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _report import table

CALLS = "gpu_calls"  # the folder of what each process measured
VERDICTS = {True: "holds", False: "does NOT hold"}


@dataclass(frozen=True)
class Promise:
    """A figure, and between what it should be."""

    what: str
    value: float
    least: float = 0.0
    most: float = math.inf

    @property
    def holds(self) -> bool:
        """Whether it is what it should be."""
        return self.least <= self.value <= self.most

    @property
    def target(self) -> str:
        """The limits in words."""
        if self.least and math.isfinite(self.most):
            return f"{self.least:g} to {self.most:g}"
        return f"at least {self.least:g}" if self.least else f"at most {self.most:g}"


@dataclass(frozen=True)
class Case:
    """The median seconds of each contestant at one thing; what was promised; who was left out, and why."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    promises: Sequence[Promise] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


Cases = Mapping[str, Case]


def predicted(makespan: float, seconds: float, of: str) -> Promise:
    """Return the promise that what was predicted is what was measured, within a tenth."""
    return Promise(f"{of}: predicted / measured", makespan / seconds, 0.9, 1.1)


# ---- Markdown


def markdown(cases: Cases, *, judged: bool = True) -> Iterator[str]:
    """Yield the parts of a report; a rehearsal is not judged."""
    contestants = list(dict.fromkeys(name for case in cases.values() for name in case.seconds))
    rows = [
        [name, *(_milliseconds(case.seconds.get(who)) for who in contestants)]
        for name, case in cases.items()
    ]
    if contestants:
        yield table(["milliseconds", *contestants], rows)
    if promised := list(promises(cases, judged)):
        yield table(["", "promise", "found", "target", "verdict"], promised)
    if noted := [
        f"* {name}: {what}: {item}"
        for name, case in cases.items()
        for what, item in case.notes.items()
    ]:
        yield "\n".join(noted)
    gone: dict[tuple[str, str], list[str]] = {}
    for name, case in cases.items():
        for who, why in case.left_out.items():
            gone.setdefault((who, why), []).append(name)
    if gone:
        yield "\n".join(
            f"* left out: {who} ({'; '.join(which)}): {why}" for (who, why), which in gone.items()
        )


def promises(cases: Cases, judged: bool = True) -> Iterator[list[str]]:
    """Yield a row for each promise."""
    for name, case in cases.items():
        for one in case.promises:
            verdict = VERDICTS[one.holds] if judged else ""
            yield [name, one.what, f"{one.value:.3f}", one.target, verdict]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


# ---- JSON


def write_json(path: Path, title: str, cases: Cases, machine: Mapping[str, str]) -> None:
    """Write all of it; a promise with its verdict."""
    found = {name: asdict(case) for name, case in cases.items()}
    for name, case in cases.items():
        for told, one in zip(found[name]["promises"], case.promises, strict=True):
            told.update(most=told["most"] if math.isfinite(told["most"]) else None, holds=one.holds)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"title": title, "machine": dict(machine), "cases": found}, indent=1) + "\n"
    )


def read_json(path: Path) -> tuple[str, dict[str, Case], dict[str, str]]:
    """Return the title, the cases and the machine of what ``write_json`` wrote."""
    told = json.loads(path.read_text())
    return (
        told["title"],
        {name: _case(item) for name, item in told["cases"].items()},
        told["machine"],
    )


def _case(item: Mapping[str, Any]) -> Case:
    limits = ((one, math.inf if one["most"] is None else one["most"]) for one in item["promises"])
    found = [Promise(one["what"], one["value"], one["least"], most) for one, most in limits]
    return Case(item["seconds"], found, item["left_out"], item["notes"])


def path_of_call(folder: Path, name: str) -> Path:
    """Return a file for what one call measures, which no other call writes."""
    now = time.time_ns()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now // 10**9))
    return folder / CALLS / f"{name}_{stamp}-{now % 10**9:09}_{os.getpid()}.json"


def earlier(path: Path, machine: Mapping[str, str]) -> dict[str, Case]:
    """Return the cases that stand in a file already, if they were measured on this machine."""
    if not path.exists():
        return {}
    _, cases, where = read_json(path)
    return cases if where == machine else {}


def summary(paths: Iterable[Path]) -> Iterator[str]:
    """Yield what all benchmarks promised and found, a table for each machine."""
    machines: dict[str, list[list[str]]] = {}
    for path in paths:
        title, cases, machine = read_json(path)
        machines.setdefault(in_words(machine), []).extend([title, *row] for row in promises(cases))
    for machine, rows in machines.items():
        kept = sum(row[-1] == VERDICTS[True] for row in rows)
        yield f"{machine}\n\n{kept} of {len(rows)} promises hold."
        yield table(["", "case", "promise", "found", "target", "verdict"], rows)


# ---- the machine


def hardware() -> dict[str, str]:
    """Return what a figure must be read with: GPU, driver, versions, CPU."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    found = {"GPU": "none", "GPUs": str(count), "driver": _driver()}
    if count and torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name(0)
        found["CUDA"], found["cuDNN"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        tf32 = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        found["hardware queues"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        found["TF32"] = "convolutions {}, products {}".format(
            *("yes" if allowed else "no" for allowed in tf32)
        )
    elif count:
        found["GPU"] = str(torch.accelerator.current_accelerator())
    versions = {"torch": str(torch.__version__), "Python": platform.python_version()}
    return found | versions | {"CPU": _cpu(), "cores": str(os.cpu_count())}


def in_words(machine: Mapping[str, str]) -> str:
    return "; ".join(f"{what}: {item}" for what, item in machine.items())


def _driver() -> str:
    asked = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    try:
        return subprocess.run(
            asked, capture_output=True, text=True, check=True, timeout=10
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
