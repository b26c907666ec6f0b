"""Small programs in all interleavings: what is found is what some of them reverse.

A program is a list of operations of the host. Here is a machine that runs it in every order that
CUDA permits, by queues and marks alone: it visits all states, each of how far the host and each
stream have come. An access surely comes before another if no state has the other done and not the
first. So this also decides whether ``brute_force``, which labels large programs, has its order right.
"""

from __future__ import annotations

import gc
import random
from typing import Any, NamedTuple

import pytest
import torch

from autosched.sanitizer import watching
from tests.sanitizer.brute_force import BruteForce, Tee
from tests.sanitizer.test_law import Known

STREAMS = 3  # the first is the default stream
PARTS = {"whole": slice(0, 4), "left": slice(0, 2), "right": slice(2, 4)}


class Op(NamedTuple):
    """What the host does: ``kind`` on a stream, or by itself, with a buffer or an event."""

    kind: str  # read, write, record, wait, new; and of the host: touch, sync, stream, device
    stream: int = 0
    name: str = ""
    part: str = "whole"


def drawn(source: random.Random, length: int) -> list[Op]:
    """Return a random program; its buffers are x, y, and the page-locked p."""
    found = []
    kinds = "read write record wait new touch sync stream device".split()
    for kind in source.choices(kinds, [6, 6, 6, 6, 4, 1, 1, 1, 1], k=length):
        name = source.choice("ab" if kind in ("record", "wait", "sync") else "xyp")
        name = {"touch": "p", "new": source.choice("xy")}.get(kind, name)
        part = "whole" if name == "p" else source.choice([*PARTS])
        found.append(Op(kind, source.randrange(STREAMS), name, part))
    return found


# ---- by all interleavings


def surely_before(ops: list[Op]) -> list[list[bool]]:
    """Return, for two operations, whether the first one surely is done before the second one."""
    queues: list[list[int]] = [[] for _ in range(STREAMS)]
    latest: dict[str, int] = {}
    needs: dict[int, list[int]] = {}  # what must be done before an operation
    for i, op in enumerate(ops):
        if op.kind in ("wait", "sync"):
            needs[i] = [latest[op.name]] if op.name in latest else []
        elif op.kind == "stream":
            needs[i] = queues[op.stream][-1:]
        elif op.kind == "device":
            needs[i] = [queue[-1] for queue in queues if queue]
        if op.kind in ("read", "write", "record", "wait"):
            queues[op.stream].append(i)
        elif op.kind == "new":
            queues[0].append(i)
        if op.kind == "record":
            latest[op.name] = i
    return _always(len(ops), queues, needs)


def _always(count: int, queues: list[list[int]], needs: dict[int, list[int]]) -> list[list[bool]]:
    """Visit all states of a program, by what each operation needs to be done."""
    before = [[True] * count for _ in range(count)]
    queued = {i for queue in queues for i in queue}
    begin = (0, *(0 for _ in queues))
    seen, open_ = {begin}, [begin]
    while open_:
        state = open_.pop()
        host, *at = state
        done = {i for queue, n in zip(queues, at, strict=True) for i in queue[:n]}
        done |= {i for i in range(host) if i not in queued}
        for i in range(count):
            if i not in done:
                for j in done:
                    before[i][j] = False
        following = []
        if host < count and (host in queued or {*needs.get(host, [])} <= done):
            following.append((host + 1, *at))
        for s, queue in enumerate(queues):
            n = at[s]
            if n < len(queue) and queue[n] < host and {*needs.get(queue[n], [])} <= done:
                following.append((host, *at[:s], n + 1, *at[s + 1 :]))
        for each in following:
            if each not in seen:
                seen.add(each)
                open_.append(each)
    return before


def expected(ops: list[Op]) -> set[tuple[str, str]]:
    """Return kinds and buffers, numbered as they are made, by the order of all interleavings."""
    before, found = surely_before(ops), set()
    number = dict.fromkeys("xyp", 0)
    made = {f"{name}0": -1 for name in "xyp"}
    uses: list[tuple[int, str, slice, bool, bool]] = []
    for i, op in enumerate(ops):
        if op.kind == "new":
            number[op.name] += 1
            made[f"{op.name}{number[op.name]}"] = i
        elif op.kind in ("read", "write", "touch"):
            buffer = f"{op.name}{number[op.name]}"
            uses.append((i, buffer, PARTS[op.part], op.kind != "read", op.kind == "touch"))
    raced = set()
    for i, buffer, part, writes, by_host in uses:
        for j, other, other_part, also_writes, also_by_host in uses:
            meet = part.start < other_part.stop and other_part.start < part.stop
            if i < j and buffer == other and meet and (writes or also_writes) and not before[i][j]:
                found.add(("host" if by_host or also_by_host else "race", buffer))
                raced.add((j, buffer))
    news = [(new, at) for new, at in made.items() if new[0] != "p"]
    for i, old, *_ in uses:
        freed = made.get(f"{old[0]}{int(old[1:]) + 1}", len(ops))  # when its successor is made
        reused = [use[:2] for use in uses for new, at in news if at >= freed and use[1] == new]
        for j, new in reused if old[0] != "p" else ():
            if not before[i][j] and not before[i][made[new]]:
                found.add(("lifetime", old))
            elif not before[i][j] and (j, new) not in raced:
                found.add(("lifetime", new))
    return found


# ---- on simulated GPUs


def labels(ops: list[Op]) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return what the detector finds, and what brute force says."""
    with watching() as watched:
        hardware = watched.detector.gpus
        known, brute = Known(hardware), BruteForce()
        hardware.observer = Tee(known, brute)
        streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
        events = {name: torch.cuda.Event() for name in "ab"}
        buffers = {name: torch.empty(4, device="cuda") for name in "xy"}
        buffers["p"] = torch.empty(4).pin_memory()
        scratch = [torch.empty(1 << 20, device="cuda") for _ in streams]  # of another size class
        torch.cuda.synchronize()
        names: dict[Any, str] = {}
        number = dict.fromkeys("xyp", 0)

        def note(name: str) -> None:
            block = getattr(buffers[name].untyped_storage(), "block", None)
            if block is not None:
                names[block.memory_known] = f"{name}{number[name]}"

        for name in "xy":
            note(name)
        for op in ops:
            buffer = buffers.get(op.name)
            part = None if buffer is None else buffer[PARTS[op.part]]
            with torch.cuda.stream(streams[op.stream]):
                if op.kind == "read" and part is not None:
                    scratch[op.stream][: len(part)].copy_(part, non_blocking=True)
                elif op.kind == "write" and part is not None:
                    part.copy_(scratch[op.stream][: len(part)], non_blocking=True)
                elif op.kind == "touch" and part is not None:
                    part.fill_(1)
                elif op.kind == "record":
                    events[op.name].record()
                elif op.kind == "wait":
                    events[op.name].wait()
                elif op.kind == "sync":
                    events[op.name].synchronize()
                elif op.kind == "stream":
                    streams[op.stream].synchronize()
                elif op.kind == "device":
                    torch.cuda.synchronize()
            if op.kind == "new":
                del buffer, part, buffers[op.name]
                gc.collect(0)
                buffers[op.name] = torch.empty(4, device="cuda")
                number[op.name] += 1
                note(op.name)
        hardware.observer = type(hardware.observer).__mro__[1]()
    storage: Any = buffers["p"].untyped_storage()
    names[getattr(storage, "memory_known", None)] = "p0"
    return tuple(
        {(kind, names[memory]) for kind, memory in each} for each in (known.labels, brute.labels())
    )  # type: ignore[return-value]


def check(seed: int, length: int) -> set[str]:
    ops = drawn(random.Random(seed), length)
    right = expected(ops)
    found, brute = labels(ops)
    assert found == right, (seed, ops)
    assert brute == right, (seed, ops)
    return {kind for kind, _ in right}


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_what_is_found_is_what_some_interleaving_reverses(first: int) -> None:
    kinds = [check(seed, 6 + seed % 8) for seed in range(first, first + 25)]
    assert {"race"} <= set().union(*kinds)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_many_interleavings(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed, 8 + seed % 8)
