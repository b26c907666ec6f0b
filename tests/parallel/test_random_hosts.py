"""Random numbers of emulated hosts in one process: as in the serial run, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional

import autosched as asc
from tests.serial import assert_equal

HOSTS = asc.Machine.emulated(gpus=0, hosts=2)


@given(ranks=st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5), data=st.data())
def test_a_run_draws_as_the_serial_run_does_or_is_refused(
    ranks: list[int], data: st.DataObject
) -> None:
    """Whatever tasks draw; the refusal names a task of each rank."""
    graph = asc.Graph("draws", generators={"cpu:0": "rank 0", "cpu:1": "rank 1"})
    x = graph.input("x")
    drawing: dict[int, str] = {}
    for number, rank in enumerate(ranks):
        with graph.on(f"cpu:{rank}"):
            draws = data.draw(st.booleans())
            fn = functional.dropout if draws else torch.relu
            x = graph.add(fn, x, name=f"t{number}")
            if draws:
                drawing.setdefault(rank, f"t{number}")
    graph.output(y=x)
    with asc.schedule(graph, HOSTS, backend="host") as schedule:
        given = torch.arange(1.0, 9.0)
        if len(drawing) == 2:
            message = f"task '{drawing[0]}' of rank 0 and task '{drawing[1]}' of rank 1 draw"
            with pytest.raises(asc.ScheduleError, match=message):
                schedule(x=given)
        else:
            torch.manual_seed(0)
            found = schedule(x=given)["y"]
            torch.manual_seed(0)
            assert torch.equal(found, schedule.run_serial(x=given)["y"])


def test_a_step_with_dropout_on_all_hosts_is_planned_and_not_run() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(), nn.Linear(6, 4))
    before = copy.deepcopy(model.state_dict())
    batch = torch.randn(8, 8), torch.randint(0, 4, (8,))
    optimizer = optim.SGD(model.parameters(), 0.1)
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, HOSTS, backend="host"
    ) as step:
        schedule = step.schedule(*batch)
        schedule.verify()
        with pytest.raises(asc.ScheduleError, match=r"run it on several processes, .*run_serial"):
            step(*batch)
        assert_equal(dict(model.state_dict()), before, "model")
        assert schedule.run_serial(**step.inputs(*batch))["loss"] > 0
        model.eval()
        assert step(*batch) > 0  # draws nothing
