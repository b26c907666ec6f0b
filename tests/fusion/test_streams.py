"""How many streams a CPU is divided into, where schedules are timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.fusion.fusing import Region
from tests.fusion.test_compilers import itself
from tests.serial import some


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Branches(nn.Module):
    """Four branches and their sum, twice; large enough to be worth a wait."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        for four in self.branches[:4], self.branches[4:]:
            x = torch.stack([functional.gelu(branch(x)) for branch in four]).sum(0)
        return x


def streams_of(made: asc.Schedule) -> int:
    return len({stream for stream in made.program.streams if stream.name.startswith("compute")})


@pytest.fixture
def fastest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of streams of the fused schedules that are the fastest."""

    def times(schedules: Sequence[asc.Schedule], _: Mapping[str, Any]) -> list[float]:
        fused = [any(isinstance(t.fn, Region) for t in made.graph.tasks) for made in schedules]
        counts = [streams_of(made) for made in schedules]
        for kind in (True, False):
            found = [
                count for count, is_fused in zip(counts, fused, strict=True) if is_fused == kind
            ]
            assert {*found} == {1, 2, 4}
        best = counts.index(request.param)
        assert fused[best]
        return [float(i != best) for i in range(len(schedules))]

    monkeypatch.setattr("autosched.fusion.fusing.run_times", times)
    return int(request.param)


@pytest.mark.parametrize("fastest", some([1, 4], 4), indirect=True)
@torch.no_grad()
def test_the_number_of_streams_that_is_measured_to_be_best_is_used(fastest: int) -> None:
    machine = asc.Machine.local(gpus=0, cpu_streams="auto")
    assert machine.device("cpu").streams == 4
    model, x = Branches().eval(), torch.randn(128, 256)
    with asc.compile(model, machine, fuse=itself) as compiled:
        torch.testing.assert_close(compiled(x), model(x))
        made = compiled.schedule(x)
        assert (made.machine.device("cpu").streams, streams_of(made)) == (fastest, fastest)
        threads = {task.fn.threads for task in made.graph.tasks if isinstance(task.fn, Region)}
        assert threads == {4 // fastest}


@pytest.mark.parametrize("fastest", [2], indirect=True)
@torch.no_grad()
def test_a_schedule_that_is_fused_keeps_the_best_number_of_streams(fastest: int) -> None:
    machine = asc.Machine.local(gpus=0, cpu_streams="auto")
    graph = asc.capture(Branches().eval(), torch.randn(128, 256))
    examples = graph.examples
    plain = asc.schedule(graph, machine, examples=examples)
    # One that was timed was closed.
    with asc.fuse(plain, examples=examples, compiler=itself) as made:
        assert streams_of(made) == fastest
        assert all(
            torch.allclose(made(**examples)[name], item, atol=1e-4)
            for name, item in graph.run_serial(**examples).items()
        )


def test_a_number_that_is_given_is_the_most() -> None:
    machine = asc.Machine.local(gpus=0, cpu_streams=2)
    graph = asc.capture(Branches().eval(), torch.randn(128, 256))
    with asc.schedule(graph, machine, policy="heft") as made:
        assert streams_of(made) == 2
