"""Runs that are recorded and replayed leave what ordinary runs leave: on played GPUs, and on real ones.

Played GPUs capture and replay by CUDA's rules, in the worst order that a seed finds, and hold NaN
where nothing was written: a replay that reads what no replay made, or too early, is seen.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.simulated_gpus import playing
from autosched.testing.checking import scattered
from tests.gpu.for_gpus import noisy_there, there
from tests.strategies import graphs, inputs_for, mix, noisy

NOWHERE = "nothing of it runs on an accelerator"


def mix_there(a, b):
    """Return a mix that needs a library and its workspace, too."""
    row = mix(a, b).reshape(1, -1)
    return mix(a, b) + torch.tanh(row @ row.t()).reshape(())


def add_(a, b):
    a.add_(b)


THERE = {noisy: noisy_there, mix: mix_there}


def equals_serial(draw, machine):
    """Run a drawn graph again and again, on inputs that change, and compare with the serial run."""
    graph = draw(graphs(machine.names)).snapshot()
    graph.tasks[:] = [
        replace(task, fn=THERE[task.fn]) if task.fn in THERE else task for task in graph.tasks
    ]
    kept = draw(st.booleans())  # whether inputs stay where they are, with other numbers
    with asc.schedule(
        graph, machine, policy=scattered(draw(st.integers(0, 99))), replay=True
    ) as schedule:
        given, earlier = there(machine, schedule.graph, inputs_for(graph)), []
        for number in range(5):
            fresh = there(machine, schedule.graph, inputs_for(graph))
            for name, tensor in fresh.items():
                given[name] = given[name].copy_(tensor + number) if kept else tensor + number
            expected_inputs = {name: tensor.clone() for name, tensor in given.items()}
            torch.manual_seed(3)
            expected = schedule.run_serial(**expected_inputs)
            torch.manual_seed(3)
            outputs = schedule(**given)
            assert all(torch.equal(outputs[label], item) for label, item in expected.items()), (
                number
            )
            assert all(torch.equal(given[name], expected_inputs[name]) for name in given), number
            earlier.append([(item, item.clone()) for item in outputs.values() if not kept])
        assert schedule.not_replayed in (None, NOWHERE)
        assert all(
            torch.equal(item, then) for pairs in earlier for item, then in pairs
        )  # no later replay changes them


@settings(max_examples=max(6, settings.default.max_examples // 4))
@given(data=st.data())
def test_replays_on_a_played_gpu_leave_what_the_serial_run_leaves(data):
    with playing(gpus=data.draw(st.integers(1, 2)), seed=data.draw(st.integers(0, 99))):
        machine = asc.Machine.local(gpus=2)
        streams = data.draw(st.integers(1, 3))
        devices = [replace(device, streams=streams) for device in machine.devices]
        equals_serial(data.draw, replace(machine, devices=devices, links=machine.links))


@pytest.mark.cuda
@settings(max_examples=40)
@given(data=st.data())
def test_replays_on_a_gpu_leave_what_the_serial_run_leaves(data):
    equals_serial(data.draw, asc.Machine.local(gpus=2))


# ---- on played GPUs, and on a real one


@pytest.fixture(params=["played", pytest.param("real", marks=pytest.mark.cuda)])
def gpu(request):
    """A machine of two devices: two played GPUs, or one real one that is both."""
    with playing(gpus=2, seed=3) if request.param == "played" else contextlib.nullcontext():
        yield asc.Machine.local(gpus=2)


def on_both(host=torch.sin):
    """x on the host, w on a GPU and written there; a copy to the other GPU; a task of the host in the middle."""
    graph = asc.Graph("on both")
    x = graph.input("x")
    with graph.on("cuda:0"):
        w = graph.input("w")
        first = graph.add(torch.mul, x, w, name="first")
        graph.add(add_, w, first, writes=[w], name="write")
    second = graph.add(torch.add, first, w, name="second", on="cuda:1")
    middle = graph.add(host, second, name="middle", on="host")
    graph.output(
        last=graph.add(torch.add, middle, first, name="last", on="cuda:0"), second=second, w=w
    )
    return graph


def runs(schedule, count=5, shape=(2, 3), moves=False):
    """Run on inputs that change, and compare with plain torch; w moves from run to run, or stays."""
    w = torch.zeros(shape, device="cuda:0")
    for _ in range(count):
        x, now = torch.rand(shape), torch.rand(shape)
        w = now.to("cuda:0") if moves else w.copy_(now)
        outputs = schedule(x=x, w=w)
        first = x * now
        second = first + (now + first)
        assert outputs["w"] is w
        assert torch.equal(w.cpu(), now + first)
        assert torch.equal(outputs["second"].cpu(), second)
        assert torch.allclose(outputs["last"].cpu(), torch.sin(second) + first)


def recordings(schedule):
    return schedule._executor.recordings.by_kind


@pytest.mark.parametrize("moves", [False, True])
def test_segments_of_two_gpus_are_replayed_around_copies_and_the_host(gpu, moves):
    with asc.schedule(on_both(), gpu, replay=True) as schedule:
        runs(schedule, moves=moves)
        assert schedule.not_replayed is None
        assert len(recordings(schedule)) == 1


def test_a_number_among_inputs_makes_a_recording_of_its_own(gpu):
    graph = asc.Graph()
    x, n = graph.inputs("x", "n")
    graph.output(y=graph.add(torch.mul, x, n, on="cuda:0"))
    with asc.schedule(graph, gpu, replay=True) as schedule:
        for n in (2, 3, 2, 3, 2, 3, 2.0):
            assert schedule(x=torch.ones(2), n=n)["y"].tolist() == [n, n]
        assert len(recordings(schedule)) == 2


def test_the_kind_that_was_used_least_recently_makes_room(gpu):
    with asc.schedule(on_both(), gpu, replay=True) as schedule:
        for size in range(1, 9):
            runs(schedule, 2, (size,))
        runs(schedule, 1, (1,))
        with pytest.warns(RuntimeWarning, match="inputs are of more than 8 kinds"):
            runs(schedule, 2, (9,))
        kept = recordings(schedule)
        assert len(kept) == 8
        runs(schedule, 1, (2,))
        assert schedule.not_replayed is None


def test_outputs_share_memory_as_they_would_in_any_run(gpu):
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        y = x + 1
        graph.output(part=x[1:], whole=y, half=y[:1], turned=y.view(torch.int32))
    with asc.schedule(graph, gpu, replay=True, inputs="cuda:0") as schedule:
        for _ in range(4):
            mine = torch.zeros(3, device="cuda:0")
            found = schedule(x=mine)
            mine.fill_(7)
            found["whole"].fill_(5)
            assert found["part"].tolist() == [7, 7]
            assert found["half"].tolist() == [5]
            assert found["turned"].view(torch.float32).tolist() == [5, 5, 5]


# ---- what cannot be replayed


def refused(graph, machine, reason, inputs, count=4):
    """Run what cannot be recorded; return the outputs. The reason is told once."""
    with asc.schedule(graph, machine, replay=True) as schedule:
        outputs = [schedule(**inputs())]
        with pytest.warns(RuntimeWarning, match=f"runs are not replayed: {reason}"):
            outputs.append(schedule(**inputs()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outputs += [schedule(**inputs()) for _ in range(count - 2)]
        assert reason in schedule.not_replayed
    return outputs


def test_a_task_that_waits_for_the_device_is_named_and_the_run_goes_on_without_graphs(gpu, caplog):
    def reads(a):
        return a * a.sum().item()

    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        graph.add(add_, x, y := x * 2, writes=[x])
        graph.output(y=graph.add(reads, y, name="reads"), x=x)
    with caplog.at_level("DEBUG", logger="autosched"):
        found = refused(graph, gpu, "task 'reads' failed: ", lambda: {"x": torch.ones(2)})
    for outputs in found:
        assert (outputs["y"].tolist(), outputs["x"].tolist()) == ([8, 8], [3, 3])
    assert "task 'reads' is not recorded" in caplog.text
    assert "in reads" in caplog.text


def test_numbers_that_tasks_make_are_not_replayed(gpu):
    graph = asc.Graph()
    x = graph.input("x")
    number = graph.add(lambda a: float(a.sum()), x, on="host", name="number")
    graph.output(y=graph.add(torch.mul, x, number, on="cuda:0"))
    values = iter(range(9))
    found = refused(
        graph,
        gpu,
        "'number', which tasks make elsewhere, is ",
        lambda: {"x": torch.ones(2) * next(values)},
    )
    assert [each["y"].tolist() for each in found] == [[0, 0], [2, 2], [8, 8], [18, 18]]


def test_a_task_that_returns_no_tensor_is_not_replayed(gpu):
    graph = asc.Graph()
    graph.output(
        y=graph.add(lambda a: {"n": 3, "t": a + 1}, graph.input("x"), on="cuda:0", name="both")
    )
    found = refused(
        graph, gpu, "task 'both' returned 3, of type int,", lambda: {"x": torch.ones(2)}
    )
    assert [each["y"]["n"] for each in found] == [3] * 4


def test_where_nothing_can_be_recorded_runs_are_ordinary_and_say_why():
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    with pytest.warns(
        RuntimeWarning, match="replay=True is for accelerators, and backend 'threads' has none"
    ):
        schedule = asc.schedule(graph, asc.Machine([asc.Device("cpu")]), replay=True)
    with schedule:
        assert schedule(x=1) == {"y": 2}
        assert schedule.not_replayed == "backend 'threads' records nothing"
    with asc.schedule(graph, asc.Machine([asc.Device("cpu")]), backend="replay") as schedule:
        assert [schedule(x=1) for _ in range(3)] == [{"y": 2}] * 3
        assert schedule.not_replayed == NOWHERE
    with pytest.raises(asc.ScheduleError, match="replay must be True or False, got 'yes'"):
        asc.schedule(graph, replay="yes")


# ---- how runs end


def test_a_task_that_raises_while_it_is_recorded_is_named_and_the_next_run_is_recorded(gpu):
    fails = [False, True, False]

    def failing(a):
        if fails and fails.pop(0):
            raise ValueError("no luck")
        return a + 1

    graph = asc.Graph()
    graph.output(y=graph.add(failing, graph.input("x"), on="cuda:0", name="failing"))
    with asc.schedule(graph, gpu, replay=True) as schedule:
        schedule(x=torch.zeros(1))
        with pytest.warns(RuntimeWarning, match="task 'failing' failed: ValueError: no luck"):
            assert schedule(x=torch.zeros(1))["y"].tolist() == [
                1
            ]  # it is called again, as in any run
        assert schedule(x=torch.zeros(1))["y"].tolist() == [1]


def test_an_interrupt_while_a_segment_is_recorded_leaves_no_capture(gpu):
    interrupts = [False, True]

    def interrupted(a):
        if interrupts and interrupts.pop(0):
            raise KeyboardInterrupt
        return a + 1

    graph = asc.Graph()
    graph.output(y=graph.add(interrupted, graph.input("x"), on="cuda:0"))
    with asc.schedule(graph, gpu, replay=True) as schedule:
        schedule(x=torch.zeros(1))
        with pytest.raises(KeyboardInterrupt):
            schedule(x=torch.zeros(1))
        assert not torch.cuda.is_current_stream_capturing()
        assert [schedule(x=torch.full((1,), float(n)))["y"].tolist() for n in range(4)] == [
            [n + 1] for n in range(4)
        ]
        assert schedule.not_replayed is None


def test_a_late_run_is_not_recorded_and_recorded_ones_are_replayed_in_time(gpu):
    with asc.schedule(on_both(), gpu, replay=True) as schedule:
        x, w = torch.ones(2), torch.ones(2, device="cuda:0")
        for _ in range(3):
            schedule(x=x, w=w, timeout=60)
        assert not recordings(schedule)
        schedule(x=x, w=w)
        assert recordings(schedule)
        assert torch.equal(
            schedule(x=x, w=w.fill_(1), timeout=60)["w"].cpu(), torch.full((2,), 2.0)
        )


def test_a_tensor_that_a_replay_writes_has_another_version(gpu):
    with asc.schedule(on_both(), gpu, replay=True) as schedule:
        runs(schedule)
        w = torch.ones(2, 3, device="cuda:0")
        for _ in range(3):
            before = w._version
            schedule(x=torch.ones(2, 3), w=w)
            assert w._version > before


# ---- on a real GPU: what CUDA made of a segment


@pytest.mark.cuda
def test_a_captured_graph_has_all_dependencies_of_its_segment(monkeypatch):
    """Two branches and a join: kernels of the branches are behind the first, the last is behind both."""
    if not hasattr(torch.cuda.CUDAGraph, "get_graph_data"):
        pytest.skip("torch before 2.13 shows no nodes of a graph")
    plain, made = torch.cuda.CUDAGraph, []

    def kept(*_, **__):
        made.append(plain(keep_graph=True))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", kept)
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        first = graph.add(torch.sin, x, name="first")
        left, right = (
            graph.add(torch.cos, first, name="left"),
            graph.add(torch.exp, first, name="right"),
        )
        graph.output(y=graph.add(torch.add, left, right, name="last"))
    machine = asc.Machine.local(gpus=1)
    machine = asc.Machine([replace(device, streams=2) for device in machine.devices], machine.links)
    with asc.schedule(graph, machine, replay=True, inputs="cuda:0") as schedule:
        for _ in range(3):
            schedule(x=torch.ones(1000, device="cuda:0"))
        made[-1].instantiate()
        try:
            nodes = made[-1].get_graph_data()["nodes"]
        except RuntimeError as error:
            pytest.skip(str(error))
    kernels = [node for node in nodes if node["node_type"] == "kernel"]
    assert len(kernels) == 4

    def behind(node):
        return {node["index"]}.union(*(behind(nodes[other]) for other in node["dependencies"]))

    sizes = sorted(len(behind(node) & {each["index"] for each in kernels}) for node in kernels)
    assert sizes == [1, 2, 2, 4]
