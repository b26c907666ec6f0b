"""Segments: where programs are cut; that a cut program orders what the whole one does, and delays nothing."""

from __future__ import annotations

from textwrap import dedent

from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Copy, Program, Record, Run, Wait, occupied
from autosched.runtime.replay.segments import Segment, segmented
from autosched.testing.checking import scattered
from tests.strategies import graphs, machines

GPUS = {"cpu": None, "cuda:0": "cuda:0", "cuda:1": "cuda:1"}
ONE_GPU = {"cpu": None, "cuda:0": "cuda:0", "cuda:1": "cuda:0"}


def cut(text, device=GPUS):
    return segmented(Program.parse(dedent(text)), device)


def flat(whole):
    """Return a cut program with the programs of its segments in it."""
    parts, instructions = iter(whole.parts), []
    for instruction in whole.program:
        part = None if isinstance(instruction, (Record, Wait)) else next(parts)
        instructions += part.program.instructions if isinstance(part, Segment) else [instruction]
    return Program(tuple(instructions), whole.program.inputs, whole.program.outputs)


def behind(program):
    """Return for each position of a run or copy all those behind which it surely is."""
    last, recorded, found = {}, {}, {}
    for i, instruction in enumerate(program):
        match instruction:
            case Record(stream, event):
                recorded[event] = last.get(stream, frozenset())
            case Wait(stream, event):
                last[stream] = last.get(stream, frozenset()) | recorded[event]
            case Run() | Copy():
                streams = occupied(instruction)
                found[i] = frozenset().union(*(last.get(stream, ()) for stream in streams))
                last.update(dict.fromkeys(streams, found[i] | {i}))
    return found


# ---- examples


def test_what_needs_no_other_device_is_one_segment_and_its_branches_fork_and_join():
    whole = cut("""
        cuda:0/compute   run a
        cuda:0/compute   record e0
        cuda:0/compute1  wait e0
        cuda:0/compute1  run b
        cuda:0/compute1  record e1
        cuda:0/compute   run c
        cuda:0/compute   wait e1
        cuda:0/compute   run d
    """)
    assert str(whole.program) == "cuda:0/compute  run segment-0"
    (segment,) = whole.segments
    assert (
        str(segment.program)
        == dedent("""
        cuda:0/compute   record e4
        cuda:0/compute1  wait e4
        cuda:0/compute   run a
        cuda:0/compute   record e2
        cuda:0/compute   run c
        cuda:0/compute1  wait e2
        cuda:0/compute1  run b
        cuda:0/compute1  record e3
        cuda:0/compute   wait e3
        cuda:0/compute   run d
        cuda:0/compute1  record e5
        cuda:0/compute   wait e5
    """).strip()
    )
    assert segment.positions == (0, 5, 3, 7)


def test_copies_between_two_devices_that_are_one_are_inside():
    text = """
        cuda:0/compute   run a
        cuda:0/compute   record e0
        cuda:0/copy-out  wait e0
        cuda:0/copy-out  copy a -> cuda:1/copy-in
        cuda:0/copy-out  record e1
        cuda:1/compute   wait e1
        cuda:1/compute   run b
    """
    assert [segment.positions for segment in cut(text, ONE_GPU).segments] == [(0, 3, 6)]
    assert [segment.positions for segment in cut(text).segments] == [(0,), (6,)]


def test_what_is_freed_for_what_comes_next_is_freed_with_it():
    """A block that is freed behind a copy must not be free for what is recorded before that copy."""
    whole = cut("""
        cuda:0/compute   run a
        cuda:0/compute   record e0
        cuda:0/copy-out  wait e0
        cuda:0/copy-out  copy a -> cpu
        cuda:0/copy-out  record e1
        cuda:0/compute   run b
        cuda:0/compute   wait e1
        cuda:0/compute   free a
        cuda:0/compute   run c
        cuda:0/compute   free b
    """)
    assert [part if isinstance(part, int) else part.positions for part in whole.parts] == [
        (0,),
        3,
        (5,),
        (7, 8, 9),
    ]


# ---- laws


@st.composite
def programs(draw):
    machine = draw(machines())
    graph = draw(graphs(machine.names))
    schedule = asc.schedule(graph, machine, policy=scattered(draw(st.integers(0, 99))))
    device = {each.name: None if each.kind == "cpu" else each.name for each in machine.devices}
    if draw(st.booleans()):
        device = {name: real and "gpu" for name, real in device.items()}
    return schedule, device


@given(programs())
def test_a_program_of_segments_cannot_race_either(made):
    """Each segment begins and ends as a whole, and all laws hold: order, presence, frees, results."""
    schedule, device = made
    whole = segmented(schedule.program, device)
    asc.verify(flat(whole), schedule.graph)
    again = {number for number, _ in enumerate(schedule.program)}
    kept = [
        i for part in whole.parts for i in (part.positions if isinstance(part, Segment) else [part])
    ]
    events = {i for i, each in enumerate(schedule.program) if isinstance(each, (Record, Wait))}
    assert sorted(kept) == sorted(again - events)


@given(programs())
def test_segments_delay_nothing(made):
    """What is on no segment's device waits for no more of the segment than it did, and is waited for by no more."""
    schedule, device = made
    whole = segmented(schedule.program, device)
    was, runs = behind(schedule.program), behind(whole.program)
    works = [i for i, each in enumerate(whole.program) if not isinstance(each, (Record, Wait))]
    part = dict(zip(works, whole.parts, strict=True))
    members = {i: [p] if isinstance(p, int) else p.positions for i, p in part.items()}
    real = {i: None if isinstance(p, int) else p.device for i, p in part.items()}
    for i, found in runs.items():
        for other in found:
            if real[i] is None or real[i] != real[other]:
                assert all(
                    a in was[b] for b in members[i] for a in members[other] if a in was and b in was
                )


@given(programs())
def test_no_two_instructions_of_one_stream_change_places(made):
    """So memory that one frees and the next takes is free by then, in every replay."""
    schedule, device = made
    order = [i for part in segmented(schedule.program, device).parts for i in _positions(part)]
    for stream in schedule.program.streams:
        on = [i for i in order if stream in occupied(schedule.program.instructions[i])]
        assert on == sorted(on)


def _positions(part):
    return part.positions if isinstance(part, Segment) else [part]
