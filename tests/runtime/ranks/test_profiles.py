"""Profiles of all ranks on one clock."""

import json
from itertools import pairwise

import pytest

from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg
from tests.runtime.ranks import jobs


@pytest.fixture(scope="module")
def found(ranks):
    """What each rank gets, though the clock of rank 1 is 1,000 seconds late."""
    return ranks.run(jobs.profile, 3, 1000.0, 2)


def test_all_ranks_get_one_timeline_with_the_spans_of_all(found):
    timeline, runs, expected, _, _, costs = found[0]
    assert runs == 2
    assert all(other[0] == timeline for other in found)
    kinds = [(span.kind, span.name, span.streams, span.instruction) for span in timeline.spans]
    assert sorted(kinds, key=str) == sorted(expected, key=str)
    assert all(span.nbytes == 4000 for span in timeline.spans if span.kind == "copy")
    assert costs.seconds.keys() == {"first", "second", "third", "fourth"}
    assert set(timeline.hosts) == {"cpu:0", "cpu:1", "cpu:2"}


def test_times_of_all_ranks_are_on_one_clock(found):
    timeline = found[0][0]
    assert 0 < timeline.doubt < 1
    assert timeline.makespan < 100
    at = {span.name: span for span in timeline.spans if span.kind == "run"}
    path = [at[name] for name in ("first", "second", "third", "fourth")]
    for before, after in pairwise(path):
        assert before.end <= after.start + 2 * timeline.doubt


def test_pictures_pages_and_traces_show_them(found):
    timeline, _, _, trace, page, _ = found[0]
    assert "clocks agree within" in gantt_svg(timeline)
    assert "clocks agree within" in page
    other = json.loads(trace)
    assert other["otherData"]["clocks agree within"].endswith("s")
    names = [
        event["args"]["name"] for event in other["traceEvents"] if event["name"] == "process_name"
    ]
    host = timeline.hosts["cpu:1"]
    assert f"cpu:1 ({host}, measured)" in names
    assert {span.name for span in Timeline.from_chrome_trace(trace).spans} == {
        span.name for span in timeline.spans
    }


def test_ranks_that_profile_other_counts_of_runs_are_told_before_any(ranks):
    for ended in ranks.run(jobs.profile, 3, 0.0, 1):
        assert ended.startswith("ScheduleError: rank 1 profiles 3 runs, and rank 0 2;")
