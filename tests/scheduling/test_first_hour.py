"""Mistakes of a first hour: each is refused, or warned of, with what to write instead."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.ones(2, 2)


def network() -> asc.Graph:
    graph = asc.Graph("net")
    x, w = graph.inputs("x", "w")
    graph.output(y=(x @ w).relu())
    return graph


@pytest.fixture
def schedule() -> Iterator[asc.Schedule]:
    with asc.schedule(network(), MACHINE) as made:
        yield made


def refused(message: str) -> Any:
    return pytest.raises(asc.AutoschedError, match=re.escape(message))


def test_a_misspelt_input_is_named_with_the_one_that_is_missing(schedule: asc.Schedule) -> None:
    message = (
        "graph 'net' misses input 'w' and was given 'v', which is no input; its inputs are 'x', 'w'"
    )
    for call in (schedule, schedule.graph.run_serial):
        with refused(message):
            call(x=X, v=X)
    with refused(message):
        asc.schedule(network(), MACHINE, examples={"x": X, "v": X})


def test_a_dict_of_inputs_is_spread_out(schedule: asc.Schedule) -> None:
    for call in (schedule, schedule.graph.run_serial, schedule.submit):
        with refused("graph 'net' was given a dict; write schedule(**inputs)"):
            call({"x": X, "w": X})
    graph = asc.Graph()
    graph.output(y=graph.add(lambda batch: batch["image"] + 1, graph.input("batch")))
    with asc.schedule(graph, MACHINE) as own:  # an input may be a dict
        assert torch.equal(own({"image": X})["y"], X + 1)


@pytest.mark.parametrize(
    ("act", "advice"),
    [
        (lambda graph: graph.inputs(["a", "b"]), "; write graph.inputs(*names)"),
        (lambda graph: graph.output([graph.value("x")]), "; write graph.output(*values)"),
        (lambda graph: graph.output({"x": graph.value("x")}), "; write graph.output(**values)"),
    ],
)
def test_lists_of_names_and_values_are_spread_out(act: Callable[[Any], Any], advice: str) -> None:
    with refused(advice):
        act(network())


def test_a_numpy_array_is_no_tensor(schedule: asc.Schedule) -> None:
    with refused("a NumPy array is no tensor: pass torch.from_numpy(array)"):
        schedule(x=X.numpy(), w=X.numpy())
    schedule(x=torch.from_numpy(X.numpy()), w=X)
    graph = asc.Graph()
    graph.output(y=graph.add(numpy.sum, graph.input("x")))
    with asc.schedule(graph, MACHINE) as own:  # functions of NumPy arrays are tasks, too
        assert own(x=X.numpy())["y"] == 4


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_report_is_no_picture(schedule: asc.Schedule, tmp_path: Path, suffix: str) -> None:
    with refused("report writes HTML, draw a picture; got"):
        schedule.report(tmp_path / f"x{suffix}")
    schedule.report(tmp_path / "x.html")


def test_a_graph_without_results_is_warned_of() -> None:
    graph = asc.Graph("net")
    x = graph.input("x")
    x + 1
    message = (
        "graph 'net' has no outputs and changes no input, so a run returns {}; write graph.output("
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as caught:
        asc.schedule(graph, MACHINE)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asc.schedule(asc.Graph(), MACHINE)
        x[0].add_(1)
        asc.schedule(graph, MACHINE)
        planned = asc.Graph()
        planned.add(abs, planned.input("x"), seconds=1.0)
        asc.schedule(planned, MACHINE)


def test_a_constraint_without_with_is_warned_of() -> None:
    graph = asc.Graph()
    with pytest.warns(UserWarning, match=re.escape("write: with graph.on('cuda:0'):")) as caught:
        graph.on("cuda:0")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with graph.on("cuda:0"):
            with graph.on("cpu"):
                a = graph.input("a")
            b = graph.input("b")
        with pytest.raises(ZeroDivisionError), graph.on("cpu"):
            1 / 0  # noqa: B018
        c = graph.input("c")
    assert [value.home for value in (a, b, c)] == ["cpu", "cuda:0", None]


def user_function(x: Any) -> Any:
    return x.no_such_method()


@pytest.mark.parametrize("backend", ["host", "threads", "emulated"])
def test_the_traceback_of_a_task_has_the_users_code_and_little_else(backend: str) -> None:
    graph = asc.Graph()
    graph.output(y=graph.add(user_function, graph.input("x")))
    with asc.schedule(graph, MACHINE, backend=backend) as schedule:
        with pytest.raises(asc.TaskError) as caught:
            schedule(x=X)
        own = [
            frame
            for frame in traceback.extract_tb(caught.tb)
            if "/autosched/autosched/" in frame.filename
        ]
        assert len(own) <= 2
        cause = traceback.extract_tb(caught.value.__cause__.__traceback__)
        assert [frame.name for frame in cause] == ["user_function"]


def test_dir_lists_what_users_call(schedule: asc.Schedule) -> None:
    """Private names, and attributes that other modules set, are left out."""
    of_graph, of_schedule = dir(network()), dir(schedule)
    assert {"add", "input", "output", "on", "run_serial", "tasks", "values", "outputs", "name"} <= {
        *of_graph
    }
    assert {"explain", "simulate", "graph", "program", "code", "makespan"} <= {*of_schedule}
    for names in (of_graph, of_schedule):
        assert not [name for name in names if name.startswith("_")]
    assert not {"storages", "cached_flow", "followed"}.intersection(of_graph)
    assert all(hasattr(network(), name) for name in of_graph)


def test_abstract_processors_are_no_gpus() -> None:
    def machine(names: list[str]) -> asc.Machine:
        links = [asc.Link(a, b, 1e9) for i, a in enumerate(names) for b in names[i + 1 :]]
        return asc.Machine([asc.Device(name) for name in names], links)

    graph = network()
    machines = [machine(["p0", "p1"]), machine(["p0", "p1", "p2"])]
    found = asc.compare(graph, machines, ["single", "heft"])
    assert [row.machine.partition(",")[0] for row in found.rows[::2]] == [
        "2 processors",
        "3 processors",
    ]
    assert ">processors<" in found.svg()
    assert "GPU" not in str(found) + found.svg()
    others = asc.compare(graph, machine(["xpu:0", "xpu:1"]), ["single"])
    assert others.rows[0].machine.startswith("2 GPUs")


def test_rows_of_many_equal_devices_are_one() -> None:
    graph = asc.Graph("wide")
    x = graph.input("x")
    graph.output(*[graph.add(torch.relu, x, seconds=1e-3, nbytes=1e6) for _ in range(36)])
    schedule = asc.schedule(graph, asc.Machine.emulated(gpus=24), policy="heft")
    text, task = str(schedule.explain()), str(schedule.explain("relu"))
    assert len(text.splitlines()) < 25
    assert len(task.splitlines()) < 15
    assert re.search(r"^cuda:\d+ to 23 +idle 5\d%", text, re.MULTILINE)
    assert re.search(r"36 tasks on (cpu, )?cuda:0 to 23$", text, re.MULTILINE)
