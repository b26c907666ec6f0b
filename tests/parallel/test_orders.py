"""Orders of pipelines, and the policy that keeps an order: bubbles, memory, no order that hangs."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import autosched as asc
from autosched.parallel import Action, Order, order
from autosched.parallel.named_orders import ORDERS
from autosched.testing.checking import scattered
from tests.strategies import graphs, machines

NAMES = [name for name in ORDERS if name != "best"]
CASES = [(p, m) for p in range(1, 9) for m in (*range(1, 9), 15, 16, 24)]
# How many micro-batches a device may hold, by the number of devices and of micro-batches.
HOLD: dict[str, Any] = {
    "gpipe": lambda p, m: m,
    "1f1b": min,
    "zb-h1": min,
    "zb-h2": lambda p, m: min(2 * p, m),
    "zb-v": min,
    "v-half": lambda p, m: min(p // 2 + 1, m),
    "v-min": lambda p, m: min((p + 4) // 3, m),
    "dualpipe-v": lambda p, m: min(p + 0.5, m),
}


def needed(action: Action, stages: int) -> Iterator[tuple[int, str, int]]:
    """Yield what an action waits for; a whole backward is named I."""
    stage, kind, chunk = action
    if kind == "F" and stage:
        yield stage - 1, "F", chunk
    if kind in ("B", "I"):
        yield stage, "F", chunk
        if stage < stages - 1:
            yield stage + 1, "I", chunk
    if kind == "W":
        yield stage, "I", chunk


def seconds_of(action: Action, table: Any) -> float:
    f, i, w = (column[action.stage] for column in table)
    return {"F": f, "B": i + w, "I": i, "W": w}[action.kind]


def bubble_of(made: Order, table: Any, copy: float) -> float:
    """Return the bubble by its definition: ends are raised until nothing changes."""
    actions = list(itertools.chain(*made.rows))
    where = {action.stage: rank for rank, row in enumerate(made.rows) for action in row}
    before = {b: a for row in made.rows for a, b in itertools.pairwise(row)}
    key = {a: (a.stage, "I" if a.kind == "B" else a.kind, a.chunk) for a in actions}
    ends = dict.fromkeys(key.values(), 0.0)
    for _ in range(len(actions) + 1):
        old = dict(ends)
        for action in actions:
            others = [
                ends[other] + copy * (where[other[0]] != where[action.stage])
                for other in needed(action, len(where))
            ]
            if action in before:
                others.append(ends[key[before[action]]])
            ends[key[action]] = max([0.0, *others]) + seconds_of(action, table)
        if ends == old:
            break
    else:
        pytest.fail("devices wait for each other")
    times = [
        ends[key[row[-1]]] - ends[key[row[0]]] + seconds_of(row[0], table) for row in made.rows
    ]
    work = [sum(seconds_of(action, table) for action in row) for row in made.rows]
    return 1 - max(work) / max(times)


def makespan(made: Order) -> float:
    starts = made.starts()
    return max(start + seconds_of(action, made.table) for action, start in starts.items())


def idle(made: Order) -> float:
    """Return the share of idle time until the last end, as papers' formulas count it."""
    return 1 - 3 * made.chunks / makespan(made)


def serial(made: Order) -> list[Action]:
    """Return the actions as one device would do them: micro-batch by micro-batch."""
    kinds = {(a.stage, a.chunk, a.kind) for row in made.rows for a in row}
    stages = range(len(made.devices))
    backward = [(stage, kind) for stage in reversed(stages) for kind in "BIW"]
    return [
        Action(stage, kind, chunk)
        for chunk in range(made.chunks)
        for stage, kind in [*((stage, "F") for stage in stages), *backward]
        if (stage, chunk, kind) in kinds
    ]


def graph_of(made: Order) -> asc.Graph:
    """Return the graph of a pipeline: each action a task on the device where its stage is."""
    where = made.devices
    graph, tasks = asc.Graph("pipeline"), {}
    for action in serial(made):
        stage, kind, chunk = action
        before = [tasks[other] for other in needed(action, len(where))]
        tasks[stage, "I" if kind == "B" else kind, chunk] = graph.add(
            len,
            *before,
            name=str(action),
            on=f"cuda:{where[stage]}",
            seconds=seconds_of(action, made.table),
            nbytes=0,
        )
    return graph


def machine_of(devices: int, bytes_per_second: float = 1e30) -> asc.Machine:
    names = ["cpu", *(f"cuda:{rank}" for rank in range(devices))]
    links = [asc.Link(a, b, bytes_per_second, 0.0) for a, b in itertools.combinations(names, 2)]
    return asc.Machine(map(asc.Device, names), links)


def sequences_of(made: Order) -> dict[str, list[str]]:
    return {f"cuda:{rank}": [*map(str, row)] for rank, row in enumerate(made.rows)}


def ran(schedule: asc.Schedule) -> dict[str, list[str]]:
    """Return the tasks of a program by device, in the order in which they are issued."""
    found: dict[str, list[str]] = {}
    for line in str(schedule.program).splitlines():
        where, _, what = line.partition("  ")
        if what.strip().startswith("run "):
            found.setdefault(where.partition("/")[0], []).append(what.split()[1])
    return found


# ---- orders


def test_bubbles_of_equal_stages_follow_their_formulas():
    for p, m in CASES:
        assert idle(order("gpipe", p, m)) == pytest.approx((p - 1) / (m + p - 1)), (p, m)
        assert idle(order("1f1b", p, m)) == pytest.approx((p - 1) / (m + p - 1)), (p, m)
        for v in (1, 2, 3, 4):
            found = idle(order("interleaved", p, m, stages=v))
            formula = (p - 1) / (v * m + p - 1)
            if m >= p or v == 1:
                assert found == pytest.approx(formula), (p, m, v)
            else:
                assert found > formula, (p, m, v)
        found, formula = idle(order("zb-v", p, m)), (p - 1) / (6 * m + p - 1)
        assert found >= formula - 1e-9, (p, m)
        if m >= 2 * p - 1:
            assert found == pytest.approx(formula), (p, m)


numbers = st.integers(1, 20)
tables = st.tuples(numbers, numbers, numbers)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), p=st.integers(1, 6), m=st.integers(1, 12), copy=st.integers(0, 5))
def test_every_order_is_complete_and_keeps_its_memory(name, data, p, m, copy):
    v = data.draw(st.integers(1, 4)) if name == "interleaved" else ORDERS[name].laps[0]
    each = st.lists(numbers, min_size=p * v, max_size=p * v)
    table = data.draw(st.one_of(tables, st.tuples(each, each, each)))
    made = order(name, p, m, seconds=table, copy=copy, stages=v)
    assert len(made.rows) == p
    assert Counter(itertools.chain(*made.rows)) == Counter(serial(made))
    assert made.devices == ORDERS[name].places(p, v)
    assert len(serial(made.split())) == 3 * p * v * m
    assert made.bubble() == pytest.approx(bubble_of(made, made.table, copy), abs=1e-9)
    other = data.draw(tables)
    spread = [[number / v] * (p * v) for number in other]
    assert made.bubble(other, 1.5) == pytest.approx(bubble_of(made, spread, 1.5), abs=1e-9)
    if name in HOLD:
        assert max(made.peak()) <= HOLD[name](p, m)
    assert made.first(1).chunks == 1


@pytest.mark.parametrize("name", NAMES)
@given(p=st.integers(1, 6), m=st.integers(1, 14))
def test_every_order_can_be_run(name, p, m):
    made = order(name, p, m)
    policy = asc.in_order(sequences_of(made))
    schedule = asc.schedule(graph_of(made), machine_of(p), policy=policy)
    assert ran(schedule) == sequences_of(made)
    assert schedule.makespan == pytest.approx(makespan(made))


# Qi et al., "Zero bubble (almost) pipeline parallelism": devices, micro-batches, seconds of F, I, W
# and of a copy as they measured them; and the bubbles of what their own generators make.
PUBLISHED = [
    (8, 24, (18522, 18086, 9337), 601, (0.2431, 0.1585, 0.0433, 0.0703), 3, 0.1090),
    (8, 24, (29718, 29444, 19927), 527, (0.2347, 0.1323, 0.0029, 0.0403), 4, 0.0827),
    (16, 48, (11347, 11248, 8132), 377, (0.2552, 0.1397, 0.0066, 0.0498), 3, 0.1136),
    (32, 96, (10419, 10207, 7715), 408, (0.2646, 0.1421, 0.0038, 0.0531), 2, 0.1528),
]


@pytest.mark.parametrize(("p", "m", "seconds", "copy", "bubbles", "v", "megatron"), PUBLISHED)
def test_bubbles_are_those_that_were_published(p, m, seconds, copy, bubbles, v, megatron):
    how = {"seconds": seconds, "copy": copy}
    for name, bubble in zip(("1f1b", "zb-h1", "zb-h2", "zb-v"), bubbles, strict=True):
        assert order(name, p, m, **how).bubble() <= bubble + 5e-5, name
    assert order("interleaved", p, m, stages=v, **how).bubble() <= megatron + 5e-5


@settings(max_examples=4)
@given(
    p=st.integers(1, 5), m=st.integers(1, 8), table=tables, copy=st.integers(0, 5), v=st.integers(1, 3),
    memory=st.integers(1, 8),
)  # fmt: skip
def test_no_order_is_better_than_the_best(p, m, table, copy, v, memory):
    how = {"seconds": table, "copy": copy, "memory": memory}
    best = order("best", p, m, stages=v, **how)
    assert Counter(itertools.chain(*best.rows)) == Counter(serial(best))
    assert max(best.peak()) <= memory
    assert best.bubble() == pytest.approx(bubble_of(best, best.table, copy), abs=1e-9)
    for name in NAMES:
        if ORDERS[name].can_have(v):
            with contextlib.suppress(asc.ScheduleError):
                assert best.bubble() <= order(name, p, m, stages=v, **how).bubble() + 1e-9, name
    assert order("best", p, m, stages=v, **how) == best


@pytest.mark.parametrize(("memory", "seconds"), [(4, 201), (5, 193), (7, 183)])
def test_the_best_order_is_as_long_as_was_published(memory, seconds):
    best = order("best", 4, 12, seconds=(5, 6, 4), memory=memory, stages=1)
    assert 180 / (1 - best.bubble()) <= seconds + 1e-6


def test_stages_of_different_seconds_have_no_bubble():
    """Qi et al. measured these; the busiest device works all the time."""
    table = [
        [30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678],
        [31308, 29344, 29357, 29455, 29217, 29384, 29354, 38731],
        [18746, 18789, 19062, 19367, 19455, 19967, 20096, 32833],
    ]
    best = order("best", 8, 32, seconds=table, copy=473, memory=8)
    assert best.devices == tuple(range(8))
    assert best.bubble() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seconds", [(0, 0, 0), (1, 0, 0), (0, 0, 1)])
def test_actions_may_take_no_time(name, seconds):
    assert 0 <= order(name, 3, 4, seconds=seconds, copy=0.5).bubble() <= 1


def test_an_order_needs_the_memory_that_it_needs():
    assert order("1f1b", 8, 24, memory=8).peak()[0] == 8
    with pytest.raises(asc.ScheduleError, match=r"'1f1b' holds .* 8 micro-batches .* memory=7"):
        order("1f1b", 8, 24, memory=7)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("dapple", 2, 2), {}, "order must be one of 'gpipe', .*'best', got 'dapple'"),
        (("gpipe", 0, 2), {}, "devices must be a number of 1 or more, got 0"),
        (("gpipe", 2, 1.5), {}, "chunks must be a number of 1 or more, got 1.5"),
        (("gpipe", 2, 2), {"stages": 2}, "stages= of order 'gpipe' must be 1, got 2"),
        (("interleaved", 2, 2), {"stages": 0}, "must be 1 or more, got 0"),
        (("zb-v", 2, 2), {"memory": 0.5}, "memory= must be 1 micro-batch or more, got 0.5"),
        (("zb-v", 2, 2), {"copy": -1}, "copy must be seconds, got -1"),
        (("zb-v", 2, 2), {"seconds": (1, 2)}, "three numbers, or three lists of 4"),
        (("zb-v", 2, 2), {"seconds": (1, [2] * 3, 3)}, "three numbers, or three lists of 4"),
        (("zb-v", 2, 2), {"seconds": (1, 1, float("nan"))}, "three numbers"),
    ],
)
def test_invalid_arguments_of_orders_are_rejected(arguments, options, message):
    with pytest.raises(asc.ScheduleError, match=message):
        order(*arguments, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["0F0 0I0 0W0", "1B0 1F0"],
            "device 0 waits forever in 0I0 for I of stage 1 and micro-batch",
        ),
        (
            ["0F0 0B0", "1F0 1I0"],
            "stage 1 must have one F, .* for micro-batch 0; it has 1 F, 0 B, 1 I",
        ),
        (["0F0 0B0", "1F0 1B0 0F1 0B1"], "stage 0 is on devices 0 and 1"),
        (["0F0 0B0", ""], "device 1 has no action"),
    ],
)
def test_wrong_orders_are_rejected(rows, message):
    made = tuple(
        tuple(Action(int(word[0]), word[1], int(word[2])) for word in row.split()) for row in rows
    )
    with pytest.raises(asc.ScheduleError, match=message):
        Order("mine", made, ((1.0,) * 2,) * 3)


# ---- torch.distributed.pipelining


def torch_stages(devices: int, laps: int, rank: int = 0) -> list[Any]:
    """Return what schedules of torch want to know of the stages of a rank."""
    count = devices * laps
    return [
        types.SimpleNamespace(
            num_stages=count, group_size=devices, group_rank=rank, group=None, stage_index=index,
            is_first=index == 0, is_last=index == count - 1, submod=None, device="cpu",
            stage_index_to_group_rank=None, has_backward=True,
        )
        for index in range(laps)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v", "v-half", "dualpipe-v"])
def test_torch_reads_orders_and_adds_communication_which_is_read_again(name, tmp_path):
    made = order(name, 4, 8)
    path = tmp_path / f"{name}.csv"
    made.save(path)
    assert path.read_text().splitlines()[0].startswith("0F0,0F1")
    assert Order.load(path) == made
    theirs = schedules._PipelineScheduleRuntime(torch_stages(4, len(made.devices) // 4), 8)
    theirs._load_csv(str(path))
    assert theirs.stage_index_to_group_rank == dict(enumerate(made.devices))
    assert [[*map(str, row)] for row in theirs.pipeline_order.values()] == [
        [*map(str, row)] for row in made.rows
    ]
    theirs._dump_csv(str(path), format="compute_comms")
    assert "SEND_F" in path.read_text()
    assert Order.load(path) == made


@pytest.mark.parametrize(
    ("kind", "name", "laps"),
    [
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("ScheduleInterleaved1F1B", "interleaved", 3),
        ("ScheduleDualPipeV", "dualpipe-v", 2),
        ("ScheduleZBVZeroBubble", "", 2),
        ("ScheduleInterleavedZeroBubble", "", 2),
        ("ScheduleLoopedBFS", "", 2),
    ],
)
def test_schedules_of_torch_are_read(kind, name, laps, tmp_path):
    theirs = getattr(schedules, kind)(torch_stages(4, laps), 8, loss_fn=len)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    found = Order.load(tmp_path / "theirs.csv", seconds=(1, 2, 3), copy=0.5)
    assert (len(found.rows), found.chunks, len(found.devices)) == (4, 8, 4 * laps)
    assert found.bubble() == pytest.approx(bubble_of(found, found.table, 0.5))
    if name:
        assert found.rows == order(name, 4, 8, stages=laps).rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "'0X0', which is no action such as 2F0"),
        ("0F,0B0", "'0F', which is no action"),
        ("", "has 0 stages for 0 devices"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0", "has 3 stages for 2 devices"),
        ("0F0,0B0\n1F0", "stage 1 must have one F, and one B"),
    ],
)
def test_what_is_no_order_is_not_read(text, message, tmp_path):
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(asc.ScheduleError, match=message):
        Order.load(tmp_path / "mine.csv")


def test_an_order_is_drawn(tmp_path):
    made = order("zb-v", 2, 3)
    made.draw(tmp_path / "zb-v.svg")
    svg = (tmp_path / "zb-v.svg").read_text()
    assert "zb-v: bubble 0.0%, at most 2 micro-batches" in svg
    assert svg.count("<title>") == 2 * 2 * 3 * 3
    assert "1W2: stage 1, micro-batch 2" in svg
    for text in ("F: forward", "I: gradient by the input", "every second stage of a device"):
        assert text in svg
    with pytest.raises(asc.errors.ChartError, match="must end in"):
        made.draw(tmp_path / "zb-v.gif")


# ---- the policy


@given(graph=graphs(), machine=machines(), seed=st.integers(0, 3))
def test_any_order_that_a_placement_has_is_kept(graph, machine, seed):
    wanted = scattered(seed)(asc.Problem(graph, machine))
    sequences = {
        name: [task for task in wanted.order if wanted.device[task] == name]
        for name in machine.names
    }
    policy = asc.in_order(sequences)
    schedule = asc.schedule(graph, machine, policy=policy)
    assert schedule.placement.device == wanted.device
    assert ran(schedule) == {name: tasks for name, tasks in sequences.items() if tasks}
    assert policy(asc.Problem(graph, machine)) == schedule.placement


def test_tasks_in_no_sequence_start_when_they_can():
    """A gradient is added where it is made, before the next one is: they must not pile up."""
    one, graph, made = order("1f1b", 2, 3), asc.Graph(), {}
    for action in serial(one):
        device, key = (
            f"cuda:{action.stage}",
            (action.stage, action.kind.replace("B", "I"), action.chunk),
        )
        before = [made[other] for other in needed(action, 2)]
        made[key] = graph.add(len, *before, name=str(action), on=device, seconds=2.0)
        if action.kind == "B":
            graph.add(
                len, made[key], name=f"sum{action.chunk}-{action.stage}", on=device, seconds=0.1
            )
    issued = ran(asc.schedule(graph, machine_of(2), policy=asc.in_order(sequences_of(one))))
    assert " ".join(issued["cuda:0"]) == "0F0 0F1 0B0 sum0-0 0F2 0B1 sum1-0 0B2 sum2-0"
    assert " ".join(issued["cuda:1"]) == "1F0 1B0 sum0-1 1F1 1B1 sum1-1 1F2 1B2 sum2-1"


def test_a_copy_does_not_wait_for_one_that_can_start_only_later():
    """Copies to one device run in order of issue. Were tasks issued as they start, the short one's would come last."""
    graph = asc.Graph()
    long = graph.add(len, name="long", on="cuda:0", seconds=3.0, nbytes=1)
    first = graph.add(len, name="first", on="cuda:1", seconds=1.0, nbytes=0)
    short = graph.add(len, first, name="short", on="cuda:1", seconds=1.0, nbytes=1)
    graph.add(len, short, name="soon", on="cuda:2", seconds=1.0)
    graph.add(len, long, name="late", on="cuda:2", seconds=1.0)
    schedule = asc.schedule(graph, machine_of(3), policy=asc.in_order({"cuda:2": ["soon", "late"]}))
    assert schedule.placement.order == ("first", "short", "long", "soon", "late")
    assert schedule.makespan == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (
            {"cuda:0": ["0B0", "0F0"]},
            "'0B0' needs '0F0', which comes after '0B0' in the sequence of 'cuda:0'",
        ),
        (
            {"cuda:0": ["0F1", "0B1", "0F0"], "cuda:1": ["1F0", "1F1"]},
            "'0B1' needs '1F1', which comes after '1F0' in the sequence of 'cuda:1', "
            "which needs '0F0', which comes after '0B1' in the sequence of 'cuda:0'",
        ),
    ],
)
def test_a_sequence_that_contradicts_the_graph_names_the_dependencies(sequences, message):
    graph = graph_of(order("1f1b", 2, 2))
    with pytest.raises(asc.ScheduleError) as raised:
        asc.schedule(graph, machine_of(2), policy=asc.in_order(sequences))
    assert str(raised.value) == f"sequences contradict the graph: {message}"


def _bound() -> asc.Graph:
    graph = asc.Graph()
    x = graph.add(len, name="x", on="cuda:0")
    graph.add(len, x, name="y", on="cuda:1")
    graph.add(len, x, name="free")
    return graph


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        (
            {"cuda:0": ["x"]},
            asc.ScheduleError,
            "task 'free' is in no sequence and is bound to no device",
        ),
        (
            {"cuda:1": ["x"]},
            asc.ScheduleError,
            "'x' is in the sequence of 'cuda:1', but must run on 'cuda:0'",
        ),
        ({"cuda:0": ["x"], "cuda:1": ["x"]}, asc.ScheduleError, "'x' is in sequences twice"),
        ({"cuda:0": ["free", "z"]}, asc.GraphError, "no task 'z'"),
        ({"cuda:7": ["free"]}, asc.MachineError, "cuda:7"),
    ],
)
def test_invalid_sequences_are_rejected(sequences, error, message):
    with pytest.raises(error, match=message):
        asc.schedule(_bound(), machine_of(2), policy=asc.in_order(sequences))


def test_tasks_that_share_memory_must_be_in_sequences_of_one_device():
    graph = asc.Graph()
    w = graph.input("w")
    graph.together(w)
    graph.add(len, w, name="one", writes=w)
    graph.add(len, w, name="other", writes=w)
    with pytest.raises(
        asc.ScheduleError,
        match="'one' is in the sequence of 'cuda:0' and 'other' in that of 'cuda:1'",
    ):
        asc.schedule(
            graph, machine_of(2), policy=asc.in_order({"cuda:0": ["one"], "cuda:1": ["other"]})
        )
    schedule = asc.schedule(graph, machine_of(2), policy=asc.in_order({"cuda:1": ["other"]}))
    assert schedule.placement.device == {"one": "cuda:1", "other": "cuda:1"}


def test_a_task_with_infinite_seconds_is_named():
    graph = asc.Graph()
    graph.add(len, name="x", on="cuda:0", seconds={"cuda:1": 1.0})
    with pytest.raises(
        asc.ScheduleError, match="task 'x' must run on 'cuda:0', but its seconds there are infinite"
    ):
        asc.schedule(graph, machine_of(2), policy=asc.in_order({}))
