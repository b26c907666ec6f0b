"""Questions to a GPU about what the design assumes: ``benchmarks/gpu --probe``, about a minute.

Each is asked in a process of its own with a time limit, as a wrong answer may be a fault that ends
the process. What is printed: the question, the observation, and what it means.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import issue
import torch
from _rig import Rig
from torch import Tensor, nn

import autosched as asc

LIMIT = 60  # seconds that a probe may take
GIB = 1 << 30
STEADY = 0.02  # by which a clock differs from its final rate when it no longer rises


class Finding(NamedTuple):
    """What was seen, and what follows."""

    observation: str
    meaning: str


class Probe(NamedTuple):
    """A question; how it is answered; what follows if the process ends without an answer."""

    question: str
    ask: Callable[[Rig], Finding]
    if_it_ends: str


# ---- the questions


def _handles(rig: Rig) -> Finding:
    x = rig.random(64, 64)
    torch.mm(x, x)
    torch.cuda.synchronize()
    errors: list[str] = []

    def record() -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                torch.mm(x, x)
        except RuntimeError as error:
            traceback.print_exc()
            errors.append(_first_line(error))

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    if errors:
        return Finding(
            errors[0], "a thread must have cuBLAS and cuDNN handles before it captures a product"
        )
    return Finding("no error", "handles may be created within a capture")


def _workspaces(rig: Rig) -> Finding:
    model, x = _linear(rig)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        wanted = model(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, stream=side):
            found = model(x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = torch.zeros(16 if rig.rehearse else GIB // 4, device=rig.device)
    right, whole = False, False
    try:
        graph.replay()
        torch.cuda.synchronize()
        right, whole = torch.allclose(found, wanted, rtol=1e-3), not bool(others.any())
    except RuntimeError as error:
        traceback.print_exc()
        return Finding(_first_line(error), _STALE)
    seen = f"numbers {'right' if right else 'WRONG'}, memory of others {_whole(whole)}"
    if right and whole:
        return Finding(seen, "this product uses no workspace, or its memory was still there")
    return Finding(seen, _STALE)


_STALE = "a graph keeps the address of its workspace: release workspaces before it is captured"


def _failed_captures(rig: Rig) -> Finding:
    nbytes = 1024 if rig.rehearse else GIB
    graph = asc.Graph("fails to record")
    with graph.on(rig.names[0]):
        x = graph.input("x")
        large = graph.add(lambda x: x.new_zeros(nbytes // 4), x, name="large")
        graph.output(y=graph.add(lambda x: x[:4] * x[0].item(), large, name="synchronizes"))
    schedule = asc.schedule(graph, rig.machine(1), inputs=rig.names[0], replay=True)
    x = torch.ones(4, device=rig.device)
    schedule(x=x)
    before = _free_bytes()  # with the libraries that the first run loads
    for _ in range(3):
        schedule(x=x)
    why = schedule.not_replayed
    schedule.close()
    lost = max(0, before - _free_bytes())
    seen = f"not replayed: {why}; {lost / GIB:.2f} GiB less are free"
    if why is None:
        return Finding(seen, "a capture with `item()` succeeded: tasks' values may be stale")
    if lost > nbytes // 2 and not rig.rehearse:
        return Finding(seen, "the pool of a failed capture is lost: it needs `_cuda_releasePool`")
    return Finding(seen, "the pool of a failed capture is released")


def _generators(rig: Rig) -> Finding:
    if rig.rehearse or not torch.version.cuda:
        return Finding("not asked", "simulated GPUs, or this torch, have no generators for CUDA")
    generator = torch.Generator(rig.device)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    graph.register_generator_state(generator)
    x = torch.ones(4, device=rig.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        for step in (x.sum().item, graph.capture_end):
            try:
                step()
            except RuntimeError as error:
                print(f"as it should: {_first_line(error)}", file=sys.stderr)
    try:
        torch.rand(4, device=rig.device, generator=generator)
    except RuntimeError as error:
        traceback.print_exc()
        return Finding(
            _first_line(error), "after a failed capture, used generators need a capture that ends"
        )
    return Finding("it draws", "a failed capture leaves the generators that were registered usable")


def _clocks(rig: Rig) -> Finding:
    start, taken, at = time.perf_counter(), [], []
    for _ in range(5 if rig.rehearse else 300):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.cuda._sleep(1_000_000)
        last.record()
        last.synchronize()
        taken.append(float(first.elapsed_time(last)))
        at.append(time.perf_counter() - start)
    final = statistics.median(taken[-len(taken) // 5 :])
    steady = steady_from(taken, final)
    seen = f"1,000,000 cycles took {taken[0]:.3f} ms at first, {final:.3f} ms at last"
    if steady == len(taken):
        return Finding(f"{seen}, never steady", "raise SPIN_SECONDS: clocks do not stand still")
    return Finding(
        f"{seen}, within 2% from reading {steady + 1}, after {at[steady] * 1e3:.0f} ms",
        "what is measured earlier than that after a pause has another clock",
    )


def steady_from(taken: list[float], final: float) -> int:
    """Return the first index from which all but one in twenty readings are the final one."""
    away = [abs(one - final) > STEADY * final for one in taken]
    return next(
        (i for i in range(len(taken)) if sum(away[i:]) <= (len(taken) - i) // 20), len(taken)
    )


def _launches(rig: Rig) -> Finding:
    plain, seconds = torch.cuda.CUDAGraph, list[float]()

    class Timed(plain):  # type: ignore[misc, valid-type]
        def replay(self) -> None:
            start = time.perf_counter()
            super().replay()
            seconds.append(time.perf_counter() - start)

    x, y = torch.rand(16, device=rig.device), torch.rand(16, device=rig.device)
    torch.cuda.CUDAGraph = Timed  # type: ignore[misc]
    try:
        replayed = issue.ours(rig, x, y, replay=True)
        ordinary = issue.ours(rig, x, y)
        calls = {"ordinary": _issued(rig, ordinary.call), "replayed": _issued(rig, replayed.call)}
    finally:
        torch.cuda.CUDAGraph = plain  # type: ignore[misc]
    why = replayed.schedule.not_replayed if replayed.schedule else None
    for entry in (replayed, ordinary):
        assert entry.schedule is not None
        entry.schedule.close()
    if not seconds:
        return Finding("nothing was replayed", f"`not_replayed` says: {why}")
    launch = statistics.median(seconds)
    told = ", ".join(f"{name} {taken * 1e3:.3f}" for name, taken in calls.items())
    share = launch / calls["ordinary"]
    verdict = "can" if share <= issue.REPLAYED else "can NOT"
    return Finding(
        f"a call in ms: {told}; `graph.replay()` alone {launch * 1e3:.3f}",
        f"`issue`'s {issue.REPLAYED} of ordinary issuing {verdict} be reached: "
        f"CUDA alone takes {share:.3f} of it",
    )


PROBES = {
    "handles": Probe(
        "May a thread create its cuBLAS handle within a capture?",
        _handles,
        "mixed programs must create handles before they are recorded",
    ),
    "workspaces": Probe(
        "Does a graph use its cuBLAS workspace after that was freed?", _workspaces, _STALE
    ),
    "failed captures": Probe(
        "Is the memory of a failed capture free again?",
        _failed_captures,
        "programs that synchronise must not be recorded here",
    ),
    "generators": Probe(
        "Does a registered generator work after a failed capture?",
        _generators,
        "programs with generators must not be recorded here",
    ),
    "clocks": Probe(
        "How long does the GPU's clock rise after a rest?", _clocks, "no time here can be trusted"
    ),
    "launches": Probe(
        "What does CUDA itself take to launch a graph of 1,000 nodes?",
        _launches,
        "`issue` will fail, too: see the traceback",
    ),
}


def _linear(rig: Rig) -> tuple[nn.Module, Tensor]:
    size = (8, 4) if rig.rehearse else (1024, 1000)
    return nn.Linear(*size, device=rig.device), rig.random(1, size[0])


def _issued(rig: Rig, call: Callable[[], Any]) -> float:
    """Return the median seconds until a call returns, from an idle GPU."""
    taken = []
    for _ in range(3 + rig.rounds(20)):
        rig.settle()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _whole(whole: bool) -> str:
    return "untouched" if whole else "OVERWRITTEN"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


# ---- processes


def main(name: str, rehearse: bool, command: list[str] | None = None, limit: float = LIMIT) -> int:
    """Ask one question here, or each in a process of its own; return 1 if any had no answer."""
    if name:
        finding = PROBES[name].ask(Rig(rehearse))
        print(f"observation: {finding.observation}\nmeaning: {finding.meaning}", flush=True)
        return 0
    command = command or [sys.executable, *sys.argv]
    results = [_asked(one, probe, command, limit) for one, probe in PROBES.items()]
    return 0 if all(results) else 1


def _asked(name: str, probe: Probe, command: list[str], limit: float) -> bool:
    """Ask in another process; return whether it answered."""
    print(f"\n{name}: {probe.question}", flush=True)
    at = command.index("--probe") + 1
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command[:at], name, *command[at:]], timeout=limit, env=_environment(), check=False
        )
        end = _in_words(done.returncode)
    except subprocess.TimeoutExpired:
        end = f"no answer in {limit:g} s"
    if end:
        print(f"observation: {end}\nmeaning: {probe.if_it_ends}", flush=True)
    print(f"({time.monotonic() - started:.1f} s)", flush=True)
    return not end


def _environment() -> Mapping[str, str]:
    root = str(Path(__file__).parents[2])
    paths = itertools.chain([root], filter(None, [os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}


def _in_words(code: int) -> str:
    if code >= 0:
        return f"the process ended with status {code}; its traceback is above" if code else ""
    return f"the process was ended by {signal.Signals(-code).name}"
