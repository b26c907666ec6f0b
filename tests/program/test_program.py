"""Programs: their text there and back, what cannot be read, streams and arrows."""

import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import ProgramError
from autosched.program.arrays import CARRIED, RECORD, RUN
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied
from autosched.program.units import predecessors, waiting_for_host

A, B = Stream("cuda:0", "compute"), Stream("cuda:1", "compute")
OUT, IN = Stream("cuda:0", "copy-out"), Stream("cuda:1", "copy-in")

ONE_OF_EACH = """
    input x on cpu
    cuda:0/copy-in   copy x <- cpu
    cuda:0/copy-in   record e0
    cuda:0/compute   wait e0
    cuda:0/compute   run h
    cuda:0/compute   record e1
    cuda:0/copy-out  wait e1
    cuda:0/copy-out  copy h@2 -> cuda:1/copy-in
    cuda:0/copy-out  copy x@1 -> cpu overwriting
    cuda:0/compute   free h@2
    output h on cuda:1
"""


def test_a_program_reads_as_a_list_of_instructions():
    copy_in = Stream("cuda:0", "copy-in")
    program = Program(
        (
            Copy(copy_in, "x", 0, "cpu", "cuda:0"),
            Record(copy_in, 0),
            Wait(A, 0),
            Run(A, "h"),
            Record(A, 1),
            Wait(OUT, 1),
            Copy(OUT, "h", 2, "cuda:0", "cuda:1", IN),
            Copy(OUT, "x", 1, "cuda:0", "cpu", overwrite=True),
            Free(A, "h", 2),
        ),
        inputs=(("x", "cpu"),),
        outputs=(("h", "cuda:1"),),
    )
    assert str(program) == inspect.cleandoc(ONE_OF_EACH)
    assert Program.parse(ONE_OF_EACH) == program
    assert (len(program), list(program)) == (9, list(program.instructions))


def test_a_loop_says_how_many_runs_are_in_flight_and_waits_for_earlier_ones():
    text = """
        3 runs in flight
        input w on cpu
        cuda:0/compute  wait e1 of 1 run ago
        cuda:0/compute  wait e1 of 2 runs ago
        cuda:0/compute  run h
        cuda:0/compute  record e1
    """
    program = Program.parse(text)
    assert program.in_flight == 3
    assert program.instructions[:2] == (Wait(A, 1, 1), Wait(A, 1, 2))
    assert str(program) == inspect.cleandoc(text)
    assert program.columns.kind.tolist() == [CARRIED, CARRIED, RUN, RECORD]
    assert program.columns.event.tolist() == [0, 0, -1, 0]


def test_an_empty_program_is_an_empty_text():
    assert str(Program(())) == ""
    assert Program.parse(" \n\n") == Program(())


# ---- text there and back

ODD = "on run copy -> <- overwriting input output e0 free wait record # é a>b 0".split()
WORDS = st.sampled_from(ODD) | st.text(min_size=1, max_size=6).filter(
    lambda s: not any(c.isspace() or c in "@" for c in s)
)
DEVICES = WORDS.filter(lambda s: "/" not in s)
STREAMS = st.builds(
    Stream, DEVICES, st.sampled_from(["compute", "compute1", "copy-in", "copy-out"]) | DEVICES
)
NUMBERS = st.integers(0, 10**6)


@st.composite
def copies(draw):
    stream, other = draw(STREAMS), draw(STREAMS)
    value, version, overwrite = draw(WORDS), draw(NUMBERS), draw(st.booleans())
    if draw(st.booleans()):
        also = draw(st.none() | st.just(other))
        return Copy(stream, value, version, stream.device, other.device, also, overwrite)
    source = draw(DEVICES.filter(lambda device: device != stream.device))
    return Copy(stream, value, version, source, stream.device, None, overwrite)


INSTRUCTIONS = (
    st.builds(Run, STREAMS, WORDS)
    | st.builds(Record, STREAMS, NUMBERS)
    | st.builds(Wait, STREAMS, NUMBERS, st.just(0) | st.integers(1, 10**6))
    | st.builds(Free, STREAMS, WORDS, NUMBERS)
    | copies()
)
PLACES = st.lists(st.tuples(WORDS, DEVICES), max_size=3).map(tuple)


@given(
    st.builds(
        Program,
        st.lists(INSTRUCTIONS, max_size=8).map(tuple),
        PLACES,
        PLACES,
        st.just(1) | st.integers(2, 10**6),
    )
)
def test_any_program_reads_back_as_it_was_written(program):
    assert Program.parse(str(program)) == program
    assert str(Program.parse(str(program))) == str(program)


TOKENS = [
    *ODD,
    "cpu",
    "cpu/compute",
    "\n",
    "\x85",
    "h@1",
    "h@0",
    "e\u0663",
    "e" + "9" * 5000,
    "h@" + "9" * 5000,
    "\ud800",
]
HEADS = [f"cpu/compute {verb}" for verb in ("run", "record", "wait", "free", "copy")]
TAILS = st.lists(st.sampled_from(TOKENS), max_size=3).map(" ".join)
LINES = st.lists(TAILS | st.builds("{} {}".format, st.sampled_from(HEADS), TAILS)).map("\n".join)


@given(st.text(alphabet="ab/@ e0>-<\n", max_size=40) | LINES | st.text())
def test_any_text_gives_a_program_or_names_a_line(text):
    try:
        program = Program.parse(text)
    except ProgramError as error:
        message = str(error)
    else:
        assert Program.parse(str(program)) == program
        return
    number = int(re.match(r"line (\d+) is no instruction: ", message)[1])
    assert message.endswith(repr(text.splitlines()[number - 1]))


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "cuda:0 run h",  # no stream
        "/compute run h",
        "cuda:0/a/b run h",
        "cuda:0/compute",
        "cuda:0/compute jump h",
        "cuda:0/compute run",
        "cuda:0/compute run h h",
        "cuda:0/compute record 0",
        "cuda:0/compute wait e" + "9" * 5000,
        "cuda:0/compute record e\u0663",
        "cuda:0/compute free h@1" + "0" * 5000,
        "cuda:0/compute free @1",
        "cuda:0/compute free h@0",  # version 0 is written without a number
        "cuda:0/compute free h@1@2",
        "cuda:0/copy-out copy h cuda:1",
        "cuda:0/copy-out copy h@x -> cuda:1",
        "cuda:0/copy-in copy h <- cuda:1/copy-out",  # the source's side names both streams
        "cuda:0/copy-out copy h -> cuda:1 over",
        "input x",
        "0 runs in flight",
        "2 runs",
        "cuda:0/compute wait e1 of 0 runs ago",
        "cuda:0/compute wait e1 of x runs ago",
    ],
)
def test_what_is_no_instruction_is_named_with_its_line(line):
    with pytest.raises(ProgramError, match=f"^{re.escape(f'line 2 is no instruction: {line!r}')}$"):
        Program.parse(f"cpu/compute run a\n{line}\ncpu/compute run b")


def test_a_program_is_read_from_a_string():
    with pytest.raises(
        ProgramError, match=r"^a program is read from a string, got b'cpu/compute  run h'$"
    ):
        Program.parse(b"cpu/compute  run h")


# ---- streams and arrows


def test_streams_are_in_order_of_first_use_also_the_second_of_a_copy():
    program = Program.parse("""
        cuda:0/copy-out  copy x -> cuda:1/copy-in
        cuda:1/compute   run b
        cuda:0/copy-out  copy y -> cpu
    """)
    assert program.streams == (OUT, IN, B)


def test_a_copy_between_copy_streams_occupies_both():
    assert occupied(Copy(OUT, "x", 0, "cuda:0", "cuda:1", IN)) == (OUT, IN)
    assert occupied(Copy(OUT, "x", 0, "cuda:0", "cuda:1")) == (OUT,)
    assert occupied(Run(A, "h")) == (A,)


def arrows(text):
    return list(Program.parse(text).arrows)


def test_an_arrow_leads_from_what_was_recorded_to_what_waits():
    assert arrows("""
        cuda:0/compute   run h
        cuda:0/compute   record e0
        cuda:0/copy-out  wait e0
        cuda:0/copy-out  copy h -> cuda:1
        cuda:0/copy-out  record e1
        cuda:1/compute   wait e1
        cuda:1/compute   run y
    """) == [(0, 3), (3, 6)]


def test_all_waits_before_an_instruction_point_at_it_and_only_at_it():
    assert arrows("""
        a/compute  run a
        a/compute  record e0
        b/compute  run b
        b/compute  record e1
        c/compute  wait e0
        c/compute  wait e1
        c/compute  run c
        c/compute  run d
    """) == [(0, 6), (2, 6)]


def test_an_event_shows_the_last_work_before_its_latest_record():
    assert arrows("""
        a/compute  run a
        a/compute  run b
        a/compute  record e0
        a/compute  run c
        b/compute  wait e0
        b/compute  run d
        a/compute  record e0
        b/compute  wait e0
        b/compute  free d
        b/compute  run e
    """) == [(1, 5), (3, 9)]


def test_waiting_for_nothing_makes_no_arrow():
    assert (
        arrows("""
        a/compute  record e0
        b/compute  wait e0
        b/compute  wait e1
        b/compute  run b
    """)
        == []
    )


def test_a_wait_for_an_earlier_run_makes_no_arrow_and_no_predecessor():
    program = Program.parse("""
        2 runs in flight
        a/compute  run a
        a/compute  record e0
        b/compute  wait e0 of 1 run ago
        b/compute  run b
    """)
    assert program.arrows == ()
    assert predecessors(program) == {0: [], 3: []}


def test_a_stream_that_waits_for_the_host_of_an_earlier_run_waits_for_the_host():
    program = Program.parse("""
        2 runs in flight
        cuda:0/compute  wait e0 of 1 run ago
        cuda:0/compute  run a
        cpu/compute     run b
        cpu/compute     record e0
    """)
    assert waiting_for_host(program, {A}) == {A, Stream("cpu", "compute")}


def test_a_copy_on_two_streams_gathers_the_waits_of_both():
    assert arrows("""
        cuda:0/compute   run h
        cuda:0/compute   record e0
        cuda:1/compute   run g
        cuda:1/compute   record e1
        cuda:0/copy-out  wait e0
        cuda:1/copy-in   wait e1
        cuda:0/copy-out  copy h -> cuda:1/copy-in
        cuda:1/copy-in   record e2
        cpu/compute      wait e2
        cpu/compute      run y
    """) == [(0, 6), (2, 6), (6, 9)]
