"""The state that tasks share: what a function's code names, and not what is called like it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import autosched as asc
from autosched.graph.effects import shared_state

net = nn.Linear(2, 2)  # what other code calls its attributes, methods and variables


def stores() -> None:
    global net  # noqa: PLW0603
    net = nn.Linear(2, 2)


def closes_over(f: Any) -> Callable[..., Any]:
    return lambda x: f(x)


def around(net: Any) -> Callable[..., Any]:
    return lambda x: net + x


def stores_an_attribute(x: Any) -> None:
    x.net = 1


def in_class() -> object:
    class Inner:
        own = net

    return Inner


def through_another(x: Any) -> Any:
    return helper(x)


def helper(x: Any) -> Any:
    return net(x)


READ: dict[str, Callable[..., Any]] = {
    "at once": lambda x: net(x),
    "in a function within": lambda x: lambda: net(x),
    "in a comprehension": lambda x: [net(item) for item in x],
    "in a generator": lambda x: sum(net(item) for item in x),
    "in a class within": in_class,
    "by a global statement": stores,
    "as a default": lambda x, f=net: f(x),
    "in a closure": closes_over(net),
    "by a function of the same file": through_another,
}


def defines_a_class() -> object:
    class Inner:
        def net(self) -> None: ...

    return Inner


def imports() -> Any:
    from torch.nn import functional as net

    return net


UNREAD: dict[str, Callable[..., Any]] = {
    "attribute": lambda x: x.net,
    "method": lambda x: x.net(x),
    "attribute that is stored": stores_an_attribute,
    "attribute in a function within": lambda x: lambda: x.net,
    "attribute in a comprehension": lambda x: [item.net for item in x],
    "method of a class within": defines_a_class,
    "keyword": lambda x: max(x, net=x),
    "parameter": lambda net: net(1),
    "variable of a comprehension": lambda x: [-net for net in x],
    "variable of a function around": around(1),
    "imported name": imports,
}


@pytest.mark.parametrize("how", READ)
def test_globals_that_a_function_reads_are_its_state(how: str) -> None:
    assert any(item is net for item in shared_state(READ[how], []))


@pytest.mark.parametrize("how", UNREAD)
def test_globals_that_are_called_like_something_else_are_not(how: str) -> None:
    assert shared_state(UNREAD[how], []) == []


def test_tasks_with_modules_of_their_own_do_not_wait_for_each_other() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for i in range(2):
        expert = SimpleNamespace(net=nn.Linear(2, 2))
        y = graph.add(lambda expert, x: expert.net(x), expert, x, on=f"cuda:{i}", seconds=1.0)
        graph.output(**{f"y{i}": y})
    assert asc.schedule(graph, asc.Machine.emulated(gpus=2)).makespan < 1.5


def made() -> Callable[[Any], Any]:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), 0.1)

    def train(x: Any) -> Any:
        model(x).sum().backward()
        optimizer.step()

    return train


step = made()  # with another model, and called like a method of optimizers


def test_a_global_that_is_called_like_a_method_is_no_part_of_a_capture() -> None:
    assert "weight" in asc.capture(made(), torch.ones(1, 2)).input_names


def test_what_an_optimizer_holds_is_state_of_a_task_that_calls_it() -> None:
    inner = optim.SGD(net.parameters(), 0.1)
    outer = optim.SGD(inner.param_groups, 0.1)
    outer.within = [inner]
    assert {id(inner), id(outer)} <= set(map(id, shared_state(outer.step, [])))
