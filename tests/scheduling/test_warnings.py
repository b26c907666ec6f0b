"""Warnings of ``schedule`` point to the line that calls it."""

import warnings

import pytest
import torch

import autosched as asc


def unknown(x):
    raise ValueError("no estimate")


def of_costs():
    graph = asc.Graph()
    graph.output(y=graph.add(unknown, graph.input("x")))
    asc.schedule(graph, asc.Machine.emulated(gpus=1), examples={"x": torch.ones(2)})


def of_replay():
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    asc.schedule(graph, asc.Machine.emulated(gpus=1), replay=True)


def of_memory():
    graph = asc.Graph()
    graph.output(y=graph.add(torch.exp, graph.input("x"), on="cuda:0", nbytes=600) + 1)
    machine = asc.Machine.emulated(gpus=1, nbytes=2000)
    costs = asc.Costs(default_nbytes=600)
    asc.schedule(graph, machine, costs=costs, in_flight=4)


@pytest.mark.parametrize("call", [of_costs, of_replay, of_memory])
def test_a_warning_points_to_the_call(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert [each.filename for each in found] == [__file__]
