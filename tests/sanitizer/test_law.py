"""The law: generated code is stream code with a proof, so nothing is found in it; what is found in it
with a line left out, or moved, is what brute force says, no more and no less.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import autosched as asc
from autosched.sanitizer import lines, watching
from autosched.sanitizer.detector import Detector
from tests.gpu.for_gpus import there
from tests.sanitizer.brute_force import BruteForce, Tee
from tests.sanitizer.programs import COSTS, drawn


class Known(Detector):
    """Keeps which memory each finding is about."""

    def __init__(self, gpus: Any):
        self.labels: set[tuple[str, Any]] = set()
        super().__init__(gpus)

    def _race(self, memory: Any, first: Any, second: Any) -> None:
        by_host = None in (first.queue, second.queue)
        self.labels.add(("host" if by_host else "race", memory))
        super()._race(memory, first, second)

    def _reused(self, old: Any, first: Any, second: Any, memory: Any) -> None:
        self.labels.add(("lifetime", memory if old is None else old.memory))
        super()._reused(old, first, second, memory)


def outcome(code: str, given: Any, schedule: asc.Schedule, inputs: Any, calls: int = 2) -> Any:
    """Run generated code; return what is found, what must be found, the report and lines of waits, if it is code."""
    skipped = lines._is_ours  # frames of the other observer are no user's
    of_us = mock.patch.object(
        lines, "_is_ours", lambda file: file.endswith("brute_force.py") or skipped(file)
    )
    with of_us, watching(4) as watched:
        hardware = watched.detector.gpus
        known, brute = Known(hardware), BruteForce()
        watched.detector = known
        hardware.observer = Tee(known, brute)
        names: dict[str, Any] = {}
        exec(compile(code, "step.py", "exec"), names)
        placed = there(schedule.machine, schedule.graph, inputs)
        try:
            for _ in range(calls):
                names["step"](**placed, **given)
        except (NameError, RuntimeError, AttributeError):  # it is no code any more
            return None
        hardware.observer = type(hardware.observer).__mro__[1]()
        waits = {line.number for line in known.asked}
        return known.labels, brute.labels(), watched.report, waits


def mutants(code: str, source: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield code with one line of order or memory left out, or moved: what, the line, the code."""
    text = code.splitlines()
    start = next(i for i, line in enumerate(text) if line.startswith("def ordered_with_caller"))
    words = ".wait_event(", ".record(", ".synchronize()", "del ", ".wait_stream(", "record_stream("
    chosen = [
        i
        for i, line in enumerate(text)
        if i > start and any(word in line for word in words) and not line.startswith('"')
    ]
    for i in chosen:
        line = text[i]
        blank = line[: len(line) - len(line.lstrip())] + "pass"
        yield (
            f"without line {i + 1}: {line.strip()}",
            line,
            "\n".join([*text[:i], blank, *text[i + 1 :]]),
        )
        begin = max(k for k in range(i) if text[k].lstrip().startswith(("def ", "try", "finally")))
        places = [k for k in range(begin + 1, len(text)) if text[k].startswith("    ") and k != i]
        k = source.choice(places)
        moved = [*text]
        moved[i] = blank
        indent = text[k][: len(text[k]) - len(text[k].lstrip())]
        moved.insert(k + (k > i), indent + line.strip())
        yield f"line {i + 1} moved to {k + 1}: {line.strip()}", line, "\n".join(moved)


def check(seed: int, most: int = 10**9) -> tuple[int, int, int]:
    """Check one graph and its mutants; return how many there were, and how many were wrong, and harmless."""
    schedule, inputs = drawn(seed)
    code = schedule.code
    found, expected, report, waits = outcome(code, code.given, schedule, inputs)
    assert (found, expected, report.findings) == (set(), set(), ()), (seed, report, str(code))
    advised = {line.number for item in report.advice for line in item.lines}
    counts = [0, 0, 0]
    every = list(mutants(str(code), random.Random(seed)))
    for what, line, mutant in random.Random(seed).sample(every, min(most, len(every))):
        try:
            result = outcome(mutant, code.given, schedule, inputs)
        except (IndentationError, SyntaxError):
            continue
        if result is None:
            continue
        found, expected, report, _ = result
        assert found == expected, (
            f"graph {seed}, {what}\nfound {sorted((k, m.name) for k, m in found - expected)}\n"
            f"not found {sorted((k, m.name) for k, m in expected - found)}\n{report}\n{mutant}"
        )
        named = {name for finding in report.findings for name in finding.names}
        assert all(m.names and {*m.names} <= named for _, m in expected if m.queue), (what, report)
        number = int(what.split()[2].rstrip(":")) if what.startswith("without") else 0
        if number in waits and not expected and (".wait_" in line or ".synchronize()" in line):
            assert number in advised, f"graph {seed}, {what} does no harm, and was not advised"
        counts = [counts[0] + 1, counts[1] + bool(expected), counts[2] + (not expected)]
    return counts[0], counts[1], counts[2]


@pytest.mark.parametrize("seed", range(6))
def test_generated_code_has_no_findings_and_its_mutants_have_what_brute_force_says(
    seed: int,
) -> None:
    torch.manual_seed(seed)
    check(seed, most=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_many_mutants(seed: int) -> None:
    check(1000 + seed)


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "in flight": {"in_flight": 2},
    "replay": {"replay": True},
}


def check_backend(seed: int, way: str) -> None:
    """Run a schedule by the accelerator backend, several times: nothing is found."""
    plain, inputs = drawn(seed)
    with watching(4, numbers=True) as watched:
        options = {"policy": "heft", "costs": COSTS, **WAYS[way]}
        with asc.schedule(plain.graph, plain.machine, **options) as schedule:
            given = [there(schedule.machine, schedule.graph, inputs) for _ in range(4)]
            if way == "in flight":
                for future in [schedule.submit(**each) for each in given]:
                    future.result()
            else:
                for each in given:
                    schedule(**each)
    assert not watched.report.findings, f"graph {seed}, {way}\n{watched.report}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_the_accelerator_backend_has_no_findings(seed: int, way: str) -> None:
    check_backend(seed, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(0, 700, 10))
def test_the_accelerator_backend_has_no_findings_on_many_graphs(seed: int, way: str) -> None:
    for each in range(100 + seed, 110 + seed):
        check_backend(each, way)
