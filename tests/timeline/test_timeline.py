"""Timelines: measures counted by hand, and the critical path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.program.program import Copy, Run, Stream
from autosched.timeline.timeline import Overlap, Span, Timeline, what

A, B, CPU = Stream("cuda:0", "compute"), Stream("cuda:1", "compute"), Stream("cpu", "compute")
OUT, IN = Stream("cuda:0", "copy-out"), Stream("cuda:1", "copy-in")


def run(name, stream, start, end, instruction):
    return Span("run", name, (stream,), start, end, instruction)


def copy(name, start, end, instruction, streams=(OUT, IN)):
    return Span("copy", name, streams, start, end, instruction)


# Copies of a, from cuda:0 to cuda:1, run behind b:
#
#   cuda:0/compute  a a b b b . .
#   the copy        . . a a . . .
#   cuda:1/compute  . . . . . c c
PIPELINE = Timeline.of(
    [run("c", B, 5, 7, 5), run("a", A, 0, 2, 0), copy("a", 2, 4, 3), run("b", A, 2, 5, 1)],
    arrows=[(0, 3), (3, 5), (0, 99)],
)


def names(spans):
    return [f"{span.kind} {span.name}" for span in spans]


def test_arrows_name_spans_and_those_of_others_are_dropped():
    assert PIPELINE.arrows == ((0, 2), (2, 3))


def test_makespan_and_busy_seconds():
    assert PIPELINE.makespan == 7
    assert [PIPELINE.busy_seconds(stream) for stream in (A, B, OUT, IN, CPU)] == [5, 2, 2, 2, 0]
    assert PIPELINE.spans[0].seconds == 2


def test_streams_come_by_device_compute_first():
    timeline = Timeline(
        (
            copy("x", 0, 1, 0, (IN,)),
            run("b", B, 1, 2, 1),
            run("a", A, 2, 3, 2),
            copy("y", 3, 4, 3, (OUT,)),
        )
    )
    assert timeline.streams == (B, IN, A, OUT)


def test_an_empty_timeline_measures_nothing():
    empty = Timeline(())
    assert (empty.makespan, empty.streams, empty.critical_path()) == (0.0, (), ())
    assert empty.overlap() == Overlap(0, 0, 0, 1.0)


# ---- overlap


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=8)


@given(INTERVALS, INTERVALS)
def test_overlap_counts_as_second_by_second_counting_does(runs, copies):
    spans = [run("r", A, s, s + n, i) for i, (s, n) in enumerate(runs)]
    spans += [copy("c", s, s + n, len(runs) + i) for i, (s, n) in enumerate(copies)]
    computing = {t for s, n in runs for t in range(s, s + n)}
    copying = [t for s, n in copies for t in range(s, s + n)]
    hidden = sum(t in computing for t in copying) / len(copying) if copying else 1.0
    assert Timeline.of(spans, ()).overlap() == Overlap(
        len(computing), len(set(copying)), len(computing & set(copying)), pytest.approx(hidden)
    )


# ---- critical path


def test_the_critical_path_follows_arrows_and_streams():
    assert names(PIPELINE.critical_path()) == ["run a", "copy a", "run c"]


def test_the_critical_path_goes_through_both_streams_of_a_copy():
    timeline = Timeline(
        (copy("x", 0, 3, 0, (IN,)), copy("y", 0, 1, 1, (OUT,)), copy("z", 3, 4, 2, (OUT, IN)))
    )
    assert names(timeline.critical_path()) == ["copy x", "copy z"]


def test_a_path_ends_where_clocks_disagree():
    """Two clocks may measure a wait the wrong way round; the walk back once went in circles then."""
    timeline = Timeline.of([run("a", A, 1.0, 2.0, 0), run("b", A, 0.9, 2.1, 1)], arrows=[(0, 1)])
    assert names(timeline.critical_path()) == ["run b"]


def test_what_a_span_shows_of_an_instruction():
    assert what(Run(A, "h")) == ("run", "h")
    assert what(Copy(OUT, "x", 1, "cuda:0", "cuda:1", IN)) == ("copy", "x")
