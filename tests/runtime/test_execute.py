"""Execute: what runs at once, what an error says, and that nothing hangs, leaks or is left behind."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

import autosched as asc
from autosched.runtime.compiler import Compiler

GENEROUS = 30  # seconds until a test that hangs fails
TWO_GPUS = asc.Machine.emulated(gpus=2)
CPUS = asc.Machine([asc.Device("cpu", streams=2)])


def plus(x, y=0):
    return x + y


def chain(*fns, **facts):
    """Return a graph of tasks of which each reads the one before."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for fn in fns:
        value = graph.add(fn, value, **facts)
    graph.output(y=value)
    return graph


def placed(graph, machine=TWO_GPUS, backend="emulated", check=False, costs=None, **device):
    """Schedule a graph with each task where it is said to be, in insertion order, on the CPU if not said."""
    names = tuple(task.name for task in graph.tasks)
    assert device.keys() <= set(names), names
    placement = asc.Placement({name: device.get(name, "cpu") for name in names}, names)
    return asc.schedule(
        graph,
        machine,
        policy=lambda *_: placement,
        backend=backend,
        check=check,
        costs=costs or asc.Costs(default_seconds=0),
    )


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("autosched")}


class Rendezvous:
    """A task that returns only when it is in flight together with the others of its kind."""

    def __init__(self, parties=2):
        self.barrier = threading.Barrier(parties, timeout=GENEROUS)

    def __call__(self, *args):
        self.barrier.wait()
        return torch.ones(1)


def two_at_once():
    meet = Rendezvous()
    graph = asc.Graph()
    graph.output(graph.add(meet, name="a"), graph.add(meet, name="b"))
    return graph


# ---- what runs at once


@pytest.mark.parametrize(
    ("machine", "backend", "device"),
    [(CPUS, "threads", {}), (TWO_GPUS, "emulated", {"a": "cuda:0", "b": "cuda:1"})],
)
def test_cpu_streams_and_emulated_devices_run_at_once(machine, backend, device):
    with placed(two_at_once(), machine, backend, **device) as schedule:
        for _ in range(3):
            schedule()


def test_copies_run_while_tasks_and_other_copies_do():
    """A task on the CPU, and a copy to each GPU of what meets the task when it is copied."""
    meet = Rendezvous(3)

    class Met:
        def __deepcopy__(self, memo):
            return meet()

    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    graph.add(meet, name="meet")
    graph.output(graph.add(plus, x, name="a"), graph.add(plus, y, name="b"))
    with placed(graph, a="cuda:0", b="cuda:1") as schedule:
        assert schedule(x=Met(), y=Met()) == {"a": 1, "b": 1}


# ---- again and again


@pytest.mark.parametrize(
    ("machine", "backend"),
    [(CPUS, "threads"), (TWO_GPUS, "host"), (TWO_GPUS, "emulated"), (TWO_GPUS, "virtual")],
)
def test_a_schedule_called_again_rebuilds_nothing(machine, backend, monkeypatch):
    with asc.schedule(
        chain(plus, plus, plus), machine, policy="round_robin", backend=backend
    ) as schedule:
        assert schedule(x=torch.ones(1)) == {"y": 1}
        for _ in range(2):
            schedule(x=torch.ones(1))
        threads = our_threads()

        def never(*_, **__):
            raise AssertionError("compiled again")

        monkeypatch.setattr(Compiler, "emit", never)
        monkeypatch.setattr(Compiler, "emit_local", never)
        for i in range(20):
            assert schedule(x=torch.full((1,), i)) == {"y": i}
        assert our_threads() == threads


@pytest.mark.parametrize("backend", ["host", "threads", "virtual"])
def test_a_program_that_executes_nothing_returns(backend):
    graph = asc.Graph()
    graph.output(y=graph.input("x"))
    with asc.schedule(graph, CPUS, backend=backend) as schedule:
        for timeout in (None, GENEROUS, None):
            assert schedule(x=1, timeout=timeout) == {"y": 1}
        assert schedule.submit(x=2).result() == {"y": 2}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_fault_counts_where_some_streams_execute_nothing(in_flight):
    graph = asc.Graph()
    graph.output(y=graph.add(fail, graph.add(plus, graph.input("x"), on="cuda:0"), on="cuda:1"))
    with asc.schedule(graph, TWO_GPUS, backend="virtual", in_flight=in_flight) as schedule:
        for _ in range(2):
            with pytest.raises(asc.TaskError, match="task 'fail' on cuda:1 failed"):
                schedule(x=1)


# ---- the end


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_close_ends_the_threads_and_may_be_called_twice(backend):
    schedule = placed(chain(plus), backend=backend)
    schedule(x=1)
    assert bool(our_threads()) == (backend == "emulated")
    schedule.close()
    schedule.close()
    assert not our_threads()
    with pytest.raises(asc.ScheduleError, match="the schedule is closed; make a new one"):
        schedule(x=1)
    with pytest.raises(asc.ScheduleError, match="the schedule is closed; make a new one"):
        schedule.profile(x=1)


@pytest.mark.parametrize("fails", [False, True])
def test_letting_go_of_a_schedule_ends_its_threads(fails):
    schedule = placed(chain(fail if fails else plus))
    if fails:
        with pytest.raises(asc.TaskError):
            schedule(x=1)
    else:
        schedule(x=1)
    assert our_threads()
    del schedule
    gc.collect()
    assert not our_threads()


# ---- errors


def fail(*args):
    raise KeyError("planted")


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
def test_a_failing_task_is_named_with_its_device_arguments_and_line(backend):
    graph = asc.Graph()
    x = graph.input("x")
    y = graph.add(fail, x, [x, torch.ones(2, 2)], 3, name="bad"); line = sys._getframe().f_lineno  # noqa: E702  # fmt: skip
    graph.output(y)
    with placed(graph, backend=backend, bad="cuda:1") as schedule:
        with pytest.raises(asc.TaskError) as error:
            schedule(x=torch.ones(3, dtype=torch.int64))
        assert isinstance(error.value.__cause__, KeyError)
        assert str(error.value) == (
            f"task 'bad' on cuda:1 failed: KeyError: 'planted'\n"
            f"    arguments: int64[3], float32[2, 2]\n    added at {__file__}:{line}"
        )


def test_arguments_that_are_no_tensors_are_shown_cut_short_and_none_are_said_to_be_none():
    graph = asc.Graph()
    graph.add(fail)
    for given, inputs, shown in (
        (chain(fail), {"x": "a" * 99}, r"'a{56}\.\.\."),
        (graph, {}, "none"),
    ):
        with (
            placed(given) as schedule,
            pytest.raises(asc.TaskError, match=f"arguments: {shown}"),
        ):
            schedule(**inputs)


@pytest.mark.parametrize("backend", ["host", "emulated"])
def test_a_failing_copy_is_named(backend):
    class Uncopyable:
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    with (
        placed(chain(plus), backend=backend, plus="cuda:0") as schedule,
        pytest.raises(
            asc.TaskError, match="copy x <- cpu on cuda:0/copy-in failed: TypeError: no copies"
        ),
    ):
        schedule(x=Uncopyable())


@pytest.mark.parametrize(
    ("outputs", "returned", "message"),
    [
        (2, (1, 2, 3), "3 results where outputs= says 2"),
        (2, 1, "one int where outputs= says 2"),
        (("a", {"b": "c"}), (1, {"z": 2}), r"\['z'\] where outputs= says a dict of \['b'\]"),
    ],
)
def test_results_of_another_shape_are_an_error_of_the_task(outputs, returned, message):
    graph = asc.Graph()
    graph.add(lambda: returned, name="pair", outputs=outputs)
    with (
        placed(graph) as schedule,
        pytest.raises(asc.TaskError, match=f"task 'pair' on cpu failed: .*{message}"),
    ):
        schedule()


def test_tasks_without_functions_can_be_planned_but_not_run():
    networkx = pytest.importorskip("networkx")
    schedule = placed(asc.Graph.from_networkx(networkx.DiGraph([("a", "b")])))
    assert schedule.makespan == 0
    with pytest.raises(
        asc.ScheduleError, match="task 'a' has no function: it can be planned, not run"
    ):
        schedule()
    assert not our_threads()


# ---- hazards


def sly_write(a, b):
    b.add_(1)
    return a + b


def sly_alias(a, b):
    return b.view(-1)


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            sly_write,
            "task 'sly' wrote its argument 'w' in place without declaring it: graph.add(..., writes=[w])\n"
            "    added at {where}",
        ),
        (
            sly_alias,
            "result 'sly' of task 'sly' shares memory with 'w' without declaring it: graph.add(..., aliases=w), "
            "or return a copy\n    added at {where}",
        ),
    ],
)
def test_a_task_that_touches_what_it_did_not_declare_is_found_out_in_the_first_run(
    fn, message, backend
):
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    graph.output(graph.add(fn, x, w, name="sly"))
    where = graph.task("sly").source
    with placed(graph, backend=backend) as schedule:
        for _ in range(2):  # a first run that failed was none
            with pytest.raises(asc.HazardError) as error:
                schedule(x=torch.ones(2), w=torch.ones(2))
            assert str(error.value) == message.format(where=where)


@pytest.mark.parametrize("check", [False, True])
def test_later_runs_are_watched_if_so_wished(check):
    honest = [True]
    with placed(chain(lambda x: x + 1 if honest else x.add_(1)), check=check) as schedule:
        schedule(x=torch.ones(1))
        honest.clear()
        if check:
            with pytest.raises(asc.HazardError, match="wrote its argument 'x'"):
                schedule(x=torch.ones(1))
        else:
            schedule(x=torch.ones(1))


def test_results_that_share_memory_with_each_other_are_found_out():
    def twins(x):
        y = x + 1
        return y, y[:1]

    graph = asc.Graph()
    graph.output(*graph.add(twins, graph.input("x"), outputs=("left", "right")))
    with (
        placed(graph) as schedule,
        pytest.raises(asc.HazardError, match=r"'right' of task 'twins' shares .* 'left'"),
    ):
        schedule(x=torch.ones(2))


def test_an_input_of_which_parts_are_written_does_not_lie_on_itself():
    graph = asc.Graph()
    x = graph.input("x")
    x[0], x[1] = 1.0, 2.0
    with (
        placed(graph) as schedule,
        pytest.raises(asc.HazardError, match="'x' overlaps itself in memory"),
    ):
        schedule(x=torch.zeros(1).expand(2))


# ---- the interpreter's exit


@pytest.mark.parametrize("backend", ["host", "virtual"])
def test_lists_and_dicts_among_arguments_are_fresh_in_every_run(backend):
    def uses_up(x, numbers, named, *, more):
        return x + numbers.pop() + named.popitem()[1] + more.pop()

    graph = asc.Graph()
    graph.output(y=graph.add(uses_up, graph.input("x"), [1.0], {"a": 2.0}, more=[3.0]))
    with asc.schedule(graph, asc.Machine.emulated(gpus=0), backend=backend) as schedule:
        for _ in range(3):
            assert schedule(x=torch.zeros(1))["y"].item() == 6.0


@pytest.mark.parametrize("backend", ["host", "emulated", "virtual"])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (1, 4)])
def test_an_expanded_input_is_written_as_torch_writes_it(backend, shape):
    """What torch writes in one place is written; what it refuses to write is refused, wherever it is."""
    graph = asc.Graph()
    x = graph.input("x")
    x.zero_()
    graph.output(y=x)
    base = torch.ones((*shape[:-1], 1))
    with placed(graph, zero="cuda:0", backend=backend) as schedule:
        for _ in range(2):
            base.fill_(1)
            assert schedule(x=base.expand(shape))["y"].tolist() == torch.zeros(shape).tolist()
            assert not base.any()
    graph = asc.Graph()
    x = graph.input("x")
    x.add_(1)
    with placed(graph, add="cuda:0", backend=backend) as schedule:
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            graph.run_serial(x=base.expand(shape))
        with pytest.raises(
            asc.AutoschedError, match=r"'add' on cuda:0 failed.*more than one element"
        ):
            schedule(x=base.expand(shape))


@pytest.mark.parametrize("look", [torch.conj, torch._neg_view])
def test_what_is_read_conjugated_or_negated_is_so_in_a_copy(look):
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(
        conj=graph.add(torch.is_conj, x, name="conj"),
        neg=graph.add(torch.is_neg, x, name="neg"),
        x=x,
    )
    given = look(torch.tensor([1 + 2j, 3j]))
    with placed(graph, conj="cuda:0", neg="cuda:0") as schedule:
        for _ in range(2):
            assert schedule(x=given) == {"conj": given.is_conj(), "neg": given.is_neg(), "x": given}
