"""What must stay together stays together, under every policy; what cannot is named."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.placement import Placement, check
from autosched.policies import POLICIES, single_on
from autosched.testing import scattered
from tests.strategies import graphs, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
POLICIES_AND_WORSE = [*POLICIES.values(), scattered(0), scattered(1)]


def update() -> asc.Graph:
    """A parameter with its moment, written by two tasks, and a task that reads what they leave."""
    graph = asc.Graph("update")
    w, m, g = graph.inputs("w", "m", "g")
    graph.together(w, m)
    m.mul_(g)
    w.sub_(m)
    graph.output(y=w + 1)
    return graph


def keepers(graph: asc.Graph, values: tuple[int, ...]) -> list[asc.Task]:
    return [
        task
        for task in graph.tasks
        if {use.value for use in (*task.changes, *task.outputs)} & {*values}
    ]


@given(graph=graphs(), machine=machines(), data=st.data())
def test_makers_and_writers_of_what_is_kept_together_share_a_device(
    graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        graph.together(*data.draw(st.lists(st.sampled_from(graph.values), min_size=1, max_size=4)))
    try:
        _ = asc.Problem(graph, machine).choices
    except asc.ScheduleError:
        for policy in POLICIES_AND_WORSE:
            with pytest.raises(asc.ScheduleError, match="these must share a device and cannot"):
                policy(asc.Problem(graph, machine, COSTS))
        return
    for policy in POLICIES_AND_WORSE:
        placement = policy(asc.Problem(graph, machine, COSTS))
        check(placement, asc.Problem(graph, machine))
        for values in graph.kept_together:
            assert len({placement.device[task.name] for task in keepers(graph, values)}) <= 1
        asc.schedule(
            graph, machine, policy=lambda *_, found=placement: found, costs=COSTS, backend="host"
        ).verify()


def test_a_value_of_another_graph_or_none_is_refused() -> None:
    graph = update()
    with pytest.raises(asc.GraphError, match="value 'x' belongs to graph 'graph', not to 'update'"):
        graph.together(graph.value("w"), asc.Graph().input("x"))
    with pytest.raises(
        asc.GraphError, match="only Values of graph 'update' can be kept together, got 'w'"
    ):
        graph.together("w")  # type: ignore[arg-type]
    with pytest.raises(asc.GraphError, match="schedule's own copy"):
        graph.snapshot().together(graph.value("w"))
    assert len(graph.kept_together) == 1


def test_what_is_kept_together_and_pinned_apart_is_named() -> None:
    said = "task 'mul' on 'cuda:0', but task 'sub' on 'cuda:1'; 'w', 'm' are kept together"
    with pytest.raises(asc.ScheduleError, match=re.escape(said)):
        asc.schedule(
            update(), asc.Machine.emulated(gpus=2), place={"mul": "cuda:0", "sub": "cuda:1"}
        )


def test_a_placement_that_parts_what_is_kept_together_is_refused() -> None:
    graph, machine = update(), asc.Machine.emulated(gpus=2)
    apart = Placement({"mul": "cuda:0", "sub": "cuda:1", "add": "cpu"}, ("mul", "sub", "add"))
    with pytest.raises(
        asc.ScheduleError, match="'sub' is placed on 'cuda:1' but must be with 'mul' on 'cuda:0'"
    ):
        check(apart, asc.Problem(graph, machine))


def test_verify_refuses_a_program_that_parts_what_is_kept_together() -> None:
    graph, machine = update(), asc.Machine.emulated(gpus=2)
    free = unbound(graph)
    apart = Placement({"mul": "cuda:0", "sub": "cuda:1", "add": "cpu"}, ("mul", "sub", "add"))
    program = asc.schedule(free, machine, policy=lambda *_: apart).program
    with pytest.raises(
        asc.ProgramError, match=r"'sub' must run with 'mul' on cuda:0 \(law: place\)"
    ):
        asc.verify(program, graph, machine)


def unbound(graph: asc.Graph) -> asc.Graph:
    twin = graph.snapshot()
    twin.kept_together.clear()
    return twin


def test_a_saved_schedule_knows_what_its_graph_keeps_together(tmp_path) -> None:
    asc.schedule(update(), asc.Machine.emulated(gpus=2), backend="host").save(
        tmp_path / "plan.json"
    )
    asc.load(tmp_path / "plan.json", update())
    with pytest.raises(asc.ScheduleError, match="saved:  together w m"):
        asc.load(tmp_path / "plan.json", unbound(update()))


def test_a_graph_shows_what_it_keeps_together() -> None:
    assert "  together w, m\n" in str(update())


# ---- the host


def on_host() -> asc.Graph:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(abs, x * 2, on="host", name="read"))
    return graph


@pytest.mark.parametrize("name", ["cpu", "cpu:7"])
def test_the_host_is_the_first_cpu_whatever_its_name(name: str) -> None:
    made = [asc.Device("cuda:0"), asc.Device(name)]
    machine = asc.Machine(made, [asc.Link("cuda:0", name, 1e9, 1e-6)], imagined=True)
    for policy in POLICIES_AND_WORSE:
        schedule = asc.schedule(on_host(), machine, policy=policy, backend="host")
        assert schedule.placement.device["read"] == name
        assert schedule(x=-2) == {"y": 4}


def test_a_program_that_takes_a_task_from_the_host_is_refused() -> None:
    machine = asc.Machine.emulated(gpus=1)
    anywhere = asc.Graph()
    x = anywhere.input("x")
    anywhere.output(y=anywhere.add(abs, x * 2, name="read"))
    wrong = asc.schedule(anywhere, machine, policy=single_on("cuda:0")).program
    with pytest.raises(asc.ProgramError, match="task 'read' must run on cpu"):
        asc.verify(wrong, on_host(), machine)


def test_what_ties_tasks_together_is_named():
    graph = asc.Graph()
    with graph.on("cuda:0"):
        made = graph.add(torch.neg, graph.input("x"), name="made")
        graph.output(view=made.t())
    with graph.on("cuda:1"):
        graph.add(torch.Tensor.mul_, made, 2, name="clip", writes=made, outputs=())
    with pytest.raises(
        asc.ScheduleError, match=r"ties them: 'clip' at .*test_placement.py:\d+; write out of place"
    ):
        asc.schedule(graph, asc.Machine.emulated(gpus=2))
