"""Pictures of runs in flight: two shades, and the period."""

from __future__ import annotations

import json
import re

import pytest

import autosched as asc
from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg, gantt_text, perfetto_json
from autosched.viz.page import page_data


@pytest.fixture(scope="module")
def loop():
    graph = asc.Graph("loop")
    value = graph.input("x")
    for name, seconds, device in (("a", 3.0, "cpu"), ("b", 4.0, "cuda:0"), ("c", 3.0, "cuda:1")):
        value = graph.add(abs, value, name=name, seconds=seconds, on=device, nbytes=1)
    graph.output(y=value)
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=1.0, latency=0.0)
    return asc.schedule(graph, machine, in_flight=3)


@pytest.fixture(scope="module")
def timeline(loop):
    return loop.simulate(runs=loop.runs_shown)


def test_every_second_run_is_paler_in_a_chart(timeline):
    svg = gantt_svg(timeline)
    assert len(re.findall(r'class="task odd[" ]', svg)) == 3 * 3 + 1  # and in the legend
    assert "task b of run 5\n" in svg
    assert "every second run" in svg


def test_the_period_is_marked_in_a_chart(loop, timeline):
    assert timeline.period == loop.period == 4.0
    svg = gantt_svg(timeline)
    assert 'class="period"' in svg
    assert "6 runs in 32 s, period 4 s" in svg


def test_text_has_two_shades_and_the_period(timeline):
    lines = gantt_text(timeline, 100).splitlines()
    assert "a████" in lines[0]
    assert "a▓▓▓▓" in lines[0]
    assert lines[-2].strip().startswith("runs: █ ▓ in turn")
    assert lines[-2].endswith("└─period─┘")


def test_arrows_lead_from_the_end_of_a_run_to_the_next_that_may_begin(timeline):
    spans = timeline.spans
    between = [
        (spans[a].name, spans[a].run, spans[b].name, spans[b].run)
        for a, b in timeline.arrows
        if spans[a].run != spans[b].run
    ]
    assert between == [("c", run, "a", run + 3) for run in range(3)]


def test_a_trace_shows_runs_and_the_period(loop, timeline):
    events = json.loads(perfetto_json(timeline, graph=loop.graph))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"run 0", "run 5", "period"} <= {event["name"] for event in slices}
    assert len([e for e in slices if (e["cat"], e["name"]) == ("run", "b")]) == 6


def test_a_page_has_items_for_each_run(loop, timeline):
    data = page_data(loop.graph, loop.program, {"predicted": timeline}, {})
    assert (data["each"], len(data["name"])) == (5, 30)
    assert data["timelines"]["predicted"]["period"] == 4e9
    assert None not in data["timelines"]["predicted"]["start"]


def test_a_median_keeps_runs_apart(timeline):
    found = Timeline.median([timeline, timeline])
    assert [span.run for span in found.spans] == [span.run for span in timeline.spans]
