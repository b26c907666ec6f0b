"""Read Chrome traces and torch.profiler traces as timelines.

Traces are JSON, from ``viz.perfetto`` or from torch.profiler. Unknown events are ignored.

torch.profiler has a slice for each task on the thread that issued it (``user_annotation``), under
the name that ``profile.annotation`` gives. It has another slice on the device
(``gpu_user_annotation``) if the task made the device do something.
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autosched._lib.allowed import is_number
from autosched.errors import TimelineError, shown
from autosched.program.program import Copy, Program, Run, Stream, occupied
from autosched.timeline.timeline import Span, Timeline, what

__all__ = ["read"]

_ANNOTATION = re.compile(r"autosched::((run|copy) ([^\s@]+).*)#(\d{1,9})")
_MOST = 1e15  # microseconds: 30 years
_Thread = tuple[Any, Any]  # pid, tid
_Key = tuple[int, int]  # run and instruction


class _Slice(NamedTuple):
    """An ``X`` event of a trace, with times in seconds."""

    start: float
    end: float
    name: str
    category: str
    thread: _Thread
    args: Mapping[str, Any]


def read(
    trace: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any],
    program: Program | None = None,
) -> Timeline:
    """Return the timeline in a trace; see ``Timeline.from_chrome_trace``."""
    events = _events(trace)
    slices = [found for found in map(_slice, events) if found is not None]
    slices.sort(key=lambda found: found.start)
    if any(map(_is_ours, slices)):
        return _read_ours(events, slices)
    runs = _read_profiled(slices, program)
    if not runs:
        raise TimelineError(
            f"the trace has {len(events)} events, and no slice of a task: it must come from "
            "viz.perfetto_json, or from torch.profiler around calls of a schedule"
        )
    return Timeline.median(runs)


# ---- parsing


def _events(trace: Any) -> list[Mapping[str, Any]]:
    document = _document(trace)
    if isinstance(document, Mapping):
        document = document.get("traceEvents")
    if not isinstance(document, Sequence) or isinstance(document, (str, bytes)):
        raise TimelineError(
            "no Chrome trace: it must be a list of events, or an object with the key 'traceEvents'"
        )
    return [event for event in document if isinstance(event, Mapping)]


def _document(trace: Any) -> Any:
    if isinstance(trace, os.PathLike):
        return _parsed(_content(Path(trace)), os.fspath(trace))
    if not isinstance(trace, str):
        return trace
    if _is_file(trace):
        return _parsed(_content(Path(trace)), trace)
    return _parsed(trace, "")


def _content(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, OSError, ValueError) as error:
        raise TimelineError(f"{path}: {error}") from error


def _parsed(text: str, path: str) -> Any:
    """Parse a JSON text; ``path`` is the file from which it comes, if any."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        which = f"the text of {path}" if path else "its text"
        like_json = text.lstrip()[:1] in ("{", "[")
        also = "" if path or like_json else ", and there is no file of that name"
        raise TimelineError(f"no Chrome trace: {which} is not JSON{also}: {error}") from error


def _is_file(text: str) -> bool:
    """Whether a text is the path of a file, rather than a trace."""
    if text.lstrip()[:1] in ("{", "["):
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with characters that no name has
        return False


def _slice(event: Mapping[str, Any]) -> _Slice | None:
    start = _nanoseconds(event.get("ts"))
    length = _nanoseconds(event.get("dur"))
    name = event.get("name")
    if event.get("ph") != "X" or start is None or length is None or not isinstance(name, str):
        return None
    args = event.get("args")
    known = args if isinstance(args, Mapping) else {}
    category = str(event.get("cat", ""))
    return _Slice(start / 1e9, (start + length) / 1e9, name, category, _thread(event), known)


def _nanoseconds(microseconds: Any) -> int | None:
    return round(microseconds * 1000) if is_number(microseconds) and microseconds < _MOST else None


def _thread(event: Mapping[str, Any]) -> _Thread:
    return str(event.get("pid")), str(event.get("tid"))


# ---- traces of viz.perfetto


def _is_ours(found: _Slice) -> bool:
    return found.category in ("run", "copy") and type(found.args.get("instruction")) is int


def _read_ours(events: Iterable[Mapping[str, Any]], slices: Sequence[_Slice]) -> Timeline:
    """Return the measured timeline of a viz.perfetto trace, or the only one."""
    # 1. Choose the group of processes.
    processes = _labels(events, "process_name")
    threads = _labels(events, "thread_name")
    groups = {str(label.get("group", "")) for label in processes.values()}
    group = "measured" if "measured" in groups else min(groups, default="")
    # 2. Find the stream of each slice of that group.
    inside = []
    streams: dict[_Thread, Stream] = {}
    for found in slices:
        process = processes.get((found.thread[0], ""), {})
        if str(process.get("group", "")) == group:
            inside.append(found)
            device = str(process.get("device", found.thread[0]))
            name = str(threads.get(found.thread, {}).get("name", found.thread[1]))
            streams[found.thread] = Stream(device, name)
    # 3. Join the slices of each instruction.
    ours = list(filter(_is_ours, inside))
    pieces: dict[_Key, list[_Slice]] = {}
    for found in ours:
        pieces.setdefault(_key(found), []).append(found)
    spans = [_joined(key, found, streams) for key, found in pieces.items()]
    pauses = tuple((found.start, found.end) for found in inside if found.category == "gc")
    return replace(Timeline.joined(spans, _arrows(events, ours)), pauses=pauses)


def _key(found: _Slice) -> _Key:
    """Return the run and the instruction of a slice of ours."""
    run = found.args.get("run", 0)
    return run if type(run) is int else 0, found.args["instruction"]


def _labels(events: Iterable[Mapping[str, Any]], what: str) -> dict[_Thread, Mapping[str, Any]]:
    """Return the metadata of processes, or of threads."""
    return {
        (_thread(event)[0], "" if what == "process_name" else _thread(event)[1]): event["args"]
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == what
        and isinstance(event.get("args"), Mapping)
    }


def _joined(key: _Key, pieces: Sequence[_Slice], where: Mapping[_Thread, Stream]) -> Span:
    """Return a span made of its slices, one on each stream: copy-out before copy-in.

    Raises TimelineError if one run has more of them, as in a file that merges two traces.
    """
    run, i = key
    _require_one_run(i, pieces, where)
    used = (where[piece.thread] for piece in pieces)
    streams = tuple(sorted(used, key=lambda stream: stream.name == "copy-in"))
    first = pieces[0]
    kind: Literal["run", "copy"] = "run" if first.category == "run" else "copy"
    start = min(piece.start for piece in pieces)
    end = min(piece.end for piece in pieces)
    nbytes = first.args.get("bytes", 0.0)
    nbytes = nbytes if is_number(nbytes) else 0.0
    return Span(kind, first.name, streams, start, end, i, nbytes, run)


def _require_one_run(i: int, pieces: Sequence[_Slice], where: Mapping[_Thread, Stream]) -> None:
    """Raise TimelineError unless an instruction has one slice per stream, at most two."""
    kinds = {(piece.category, piece.name) for piece in pieces}
    streams = {where[piece.thread] for piece in pieces}
    most = 2 if pieces[0].category == "copy" else 1
    if len(kinds) == 1 and len(pieces) == len(streams) <= most:
        return
    found = ", ".join(
        f"{piece.category} {shown(piece.name)} on {shown(str(where[piece.thread]))} "
        f"at {piece.start * 1e6:.6g} us"
        for piece in pieces[:3]
    )
    raise TimelineError(
        f"the trace has {len(pieces)} slices of instruction {i} ({found}), where one run of one "
        "program has one on each stream that it occupies; read traces one by one, and join runs "
        "of one program by Timeline.median"
    )


def _arrows(
    events: Iterable[Mapping[str, Any]], slices: Sequence[_Slice]
) -> list[tuple[_Key, _Key]]:
    """Return the pairs of instructions that arrows connect, each with its run."""
    by_thread: dict[_Thread, tuple[list[float], list[_Key]]] = {}
    for found in slices:
        starts, instructions = by_thread.setdefault(found.thread, ([], []))
        starts.append(found.start)
        instructions.append(_key(found))
    ends: dict[str, dict[str, _Key]] = {}
    for event in events:
        moment = _nanoseconds(event.get("ts")) if event.get("ph") in ("s", "f") else None
        if moment is not None and _thread(event) in by_thread:
            starts, instructions = by_thread[_thread(event)]
            at = bisect.bisect(starts, moment / 1e9) - 1
            ends.setdefault(str(event.get("id")), {})[event["ph"]] = instructions[max(at, 0)]
    return [(pair["s"], pair["f"]) for pair in ends.values() if len(pair) == 2]


# ---- traces of torch.profiler


def _read_profiled(slices: Iterable[_Slice], program: Program | None) -> list[Timeline]:
    """Return the runs in a trace, each from its own beginning; incomplete runs are dropped."""
    seen: dict[int, dict[str, list[Span]]] = {}
    for found in slices:
        if found.category in ("user_annotation", "gpu_user_annotation"):
            span = _annotated(found, program)
            if span is not None:
                seen.setdefault(span.instruction, {}).setdefault(found.category, []).append(span)
    lines = [_best(by_category) for by_category in seen.values()]
    arrows = program.arrows if program is not None else ()
    runs = min(map(len, lines), default=0)
    # A later call may come from another thread, but it is the same program.
    return [
        _from_zero([replace(line[k], streams=line[0].streams) for line in lines], arrows)
        for k in range(runs)
    ]


def _best(by_category: Mapping[str, list[Span]]) -> list[Span]:
    """Return the device's slices if complete, else those of the issuing thread."""
    issued = by_category.get("user_annotation", [])
    done = by_category.get("gpu_user_annotation", [])
    return done if len(done) >= len(issued) else issued


def _annotated(found: _Slice, program: Program | None) -> Span | None:
    match = _ANNOTATION.fullmatch(found.name)
    if match is None:
        return None
    text, kind, name, digits = match.groups()
    number = int(digits)
    if program is None:
        stream = Stream(f"process {found.thread[0]}", f"thread {found.thread[1]}")
        span_kind: Literal["run", "copy"] = "run" if kind == "run" else "copy"
        return Span(span_kind, name, (stream,), found.start, found.end, number)
    instruction = program.instructions[number] if number < len(program) else None
    if not isinstance(instruction, (Run, Copy)) or str(instruction) != text:
        return None
    return Span(*what(instruction), occupied(instruction), found.start, found.end, number)


def _from_zero(spans: Sequence[Span], arrows: Iterable[tuple[int, int]]) -> Timeline:
    zero = min(span.start for span in spans)

    def since(moment: float) -> float:
        return round((moment - zero) * 1e9) / 1e9

    moved = [replace(span, start=since(span.start), end=since(span.end)) for span in spans]
    return Timeline.of(moved, arrows)
