"""Pictures and explanations of clusters: rows by host, copies over the network."""

from __future__ import annotations

import re

import pytest

import autosched as asc
from autosched.viz import gantt_svg, gantt_text


def nothing(*_):
    raise AssertionError("nothing runs here")


@pytest.fixture(scope="module")
def schedule():
    graph = asc.Graph("ring")
    value = graph.input("x")
    for i in range(4):
        value = graph.add(nothing, value, name=f"t{i}", on=f"cuda:{i % 2}", seconds=1e-3)
    graph.output(y=value)
    costs = asc.Costs(default_nbytes=1e6)
    return asc.schedule(graph, asc.Machine.emulated(1, hosts=2), policy="heft", costs=costs)


def test_rows_of_a_chart_are_grouped_by_host(schedule):
    timeline = schedule.simulate()
    lines = [line.split()[0] for line in gantt_text(timeline).splitlines()]
    names = [line for line in lines if re.fullmatch(r"host|cpu:\d|cuda:\d", line)]
    assert names == ["host", "cpu:0", "cuda:0", "host", "cpu:1", "cuda:1"]
    svg = gantt_svg(timeline)
    places = [svg.index(f">{name}<") for name in ("host 0", "cuda:0", "host 1", "cpu:1", "cuda:1")]
    assert places[0] < places[2]
    heights = {
        name: float(re.search(rf'y="([\d.]+)"[^>]*>{name}<', svg)[1])
        for name in ("host 0", "cpu:0", "cuda:0", "host 1", "cpu:1", "cuda:1")
    }
    assert sorted(heights, key=heights.get) == list(heights)


def test_a_machine_of_one_process_has_no_headings():
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    made = asc.schedule(
        graph, asc.Machine.emulated(1), policy="heft", costs=asc.Costs.table({"add": 1})
    )
    assert made.simulate().hosts == {}
    assert "host" not in gantt_text(made.simulate())


def test_the_page_lists_streams_by_rank(schedule):
    from autosched.viz.page import page_data

    found = page_data(schedule.graph, schedule.program, {"predicted": schedule.simulate()}, {})
    devices = list(dict.fromkeys(device for device, _ in found["streams"]))
    assert devices == ["cpu:0", "cuda:0", "cpu:1", "cuda:1"]
    hosts = dict(zip((device for device, _ in found["streams"]), found["hosts"], strict=True))
    assert hosts == {"cpu:0": "host 0", "cuda:0": "host 0", "cpu:1": "host 1", "cuda:1": "host 1"}


def test_explanations_name_the_network(schedule):
    found = schedule.explain()
    where = [step.where for step in found.critical_path if step.kind == "copy"]
    assert "cpu:0 -> cpu:1 over the network" in where
    assert "cuda:0 -> cpu:0" in where
    assert 0 < found.twice_as_fast["the network"] < found.twice_as_fast["accelerators"]
    assert "copy streams" not in str(found)


def test_saved_schedules_keep_ranks(schedule, tmp_path):
    schedule.save(tmp_path / "saved.json")
    loaded = asc.load(tmp_path / "saved.json", schedule.graph)
    assert loaded.program == schedule.program
    assert loaded.machine == schedule.machine
