"""The graphs that ``fuse`` returns, and everything that takes a graph or a schedule."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.codegen.composite import Composite
from autosched.costs.estimate import estimate
from autosched.fusion.fusing import region_seconds, run_times
from autosched.fusion.region import Region
from autosched.measurement.tasks import least_work, work_of
from autosched.viz.page import page_data
from autosched.viz.perfetto import perfetto_json
from tests.codegen.test_codegen import fresh, run
from tests.frontends.steps import stepper
from tests.fusion.regions import compiled_by, needs_compiler

GPUS = asc.Machine.emulated(gpus=2)
CPU = asc.Machine.local(gpus=0)


@pytest.fixture
def compiled() -> Iterator[list[torch.fx.GraphModule]]:
    with compiled_by() as graphs:
        yield graphs


def test_a_task_that_cannot_be_fused_is_none_with_its_views_either() -> None:
    graph = asc.Graph()
    x = graph.input("x") * 2
    noise = graph.add(torch.ops.aten.bernoulli.default, x.t(), name="noise")
    graph.output(y=noise + 1)
    fused = asc.fuse(graph, GPUS)
    assert not isinstance(fused.task("noise").fn, Region)
    assert fused.not_fused == {"noise": "draws random numbers"}


def test_a_schedule_is_fused_as_it_is_and_takes_no_other_plan() -> None:
    graph = asc.Graph()
    graph.output(y=(graph.input("x") + 1) * 2)
    schedule = asc.schedule(graph, asc.Machine.emulated(gpus=1))
    others: list[dict[str, Any]] = [{"policy": "heft"}, {"machine": schedule.machine}, {"seed": 1}]
    for options in others:
        with pytest.raises(asc.ScheduleError, match="fuse keeps the machine, costs and plan"):
            asc.fuse(schedule, **options)
    given: Any = 3
    for fused in (graph, schedule):
        with pytest.raises(asc.ScheduleError, match="examples must be an input of each name"):
            asc.fuse(fused, examples=given)


def test_regions_are_not_compiled_for_several_ranks() -> None:
    machine = asc.Machine.emulated(gpus=0, hosts=2)
    graph = asc.capture(lambda x: (x + 1) * 2, torch.ones(3))
    for fuse in (
        lambda: asc.fuse(graph, machine),
        lambda: asc.fuse(asc.schedule(graph, machine)),
        lambda: asc.compile(torch.neg, machine, fuse=True)(torch.ones(3)),
    ):
        with pytest.raises(
            asc.ScheduleError, match=r"for one process.*has several ranks; leave out"
        ):
            fuse()


def own(x: Tensor) -> Tensor:
    return x.relu() + 1


def chain() -> asc.Graph:
    """Return a graph that writes, draws, and returns several values."""
    graph = asc.Graph("chain")
    x, w = graph.inputs("x", "w")
    h = (x @ w.t() + 1).relu()
    noise = graph.add(torch.ops.aten.bernoulli.default, h * 0, name="noise")
    w.mul_(0.5).add_(1)
    graph.output(y=graph.add(own, h * noise, name="own").sum(), h=h)
    return graph


def inputs() -> dict[str, Tensor]:
    return {"x": torch.arange(6.0).reshape(2, 3), "w": torch.ones(4, 3)}


def outcome(call: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    given = inputs()
    return {**call(**given), **given}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], item) for name, item in expected.items())


def regions(graph: asc.Graph) -> list[Region]:
    return [task.fn for task in graph.tasks if isinstance(task.fn, Region)]


# ---- what is fused


def test_regions_end_where_random_numbers_are_drawn(compiled: Any) -> None:
    graph = asc.fuse(chain(), GPUS, policy="single")
    assert [task.operators or task.name for task in graph.tasks] == [
        ("matmul", "add", "relu", "mul", "mul_1", "add_1"),
        "noise",
        ("mul_2", "own", "sum"),
    ]
    assert graph.not_fused == {"noise": "draws random numbers"}
    assert_same(outcome(graph.run_serial), outcome(chain().run_serial))


def test_without_a_compiler_the_graph_stays_and_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr("autosched.fusion.fusing.unavailable", lambda kind: "no such thing")
    with pytest.warns(RuntimeWarning, match="graph 'chain' is not fused: no such thing"):
        graph = asc.fuse(chain(), GPUS)
    assert not regions(graph)
    with asc.schedule(graph, GPUS) as schedule:
        assert set(schedule.not_fused.values()) == {"no such thing"}
        assert "own" in schedule.not_fused


def test_a_region_that_fails_runs_unfused_and_its_schedule_says_why() -> None:
    def failing(graph: Any, args: Any, threads: int) -> Any:
        raise ValueError("no kernels today")

    with compiled_by(failing):
        graph = asc.fuse(chain(), GPUS, policy="single")
        with asc.schedule(graph, GPUS, policy="single", backend="host") as schedule:
            assert schedule.not_fused == {"noise": "draws random numbers"}
            assert_same(outcome(schedule), outcome(chain().run_serial))
            names = [task.name for task in graph.tasks if task.operators]
            why = "Inductor: ValueError: no kernels today"
            assert schedule.not_fused == dict.fromkeys(names, why) | dict(graph.not_fused)


def test_graphs_of_merged_tasks_are_fused(compiled: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.rand(3, 4)
    for groups in ("op", "module"):
        graph = asc.merge(asc.capture(model, x), groups)
        fused = asc.fuse(graph, GPUS, policy="single")
        assert len(regions(fused)) == 1
        again = asc.fuse(fused, GPUS, policy="single")
        for found in (fused, again):
            assert torch.equal(_output(found), _output(graph))


def test_a_region_is_where_one_of_its_tasks_is_placed(compiled: Any) -> None:
    graph = asc.capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), x := torch.rand(3, 4))
    plain = asc.schedule(graph, GPUS, place={"0": "cuda:1"})
    for fused in (asc.fuse(graph, GPUS, place={"0": "cuda:1"}), asc.fuse(plain).graph):
        assert [task.device for task in fused.tasks if task.operators] == ["cuda:1"]
        assert torch.equal(fused.run_serial(**graph.feed(x))["result"], _output(graph))


def _output(graph: Any) -> Tensor:
    (found,) = graph.run_serial(**graph.examples).values()
    assert isinstance(found, Tensor)
    return found


def test_regions_need_room_for_copies_of_what_they_write_and_return(compiled: Any) -> None:
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    with graph.on("cuda:0"):
        w.mul_(2).add_(x)
        graph.output(y=(w + 1) * 2)
    examples = {"x": torch.ones(1000), "w": torch.ones(1000)}  # of 4 kB each

    def fused(nbytes: float) -> asc.Graph:
        machine = asc.Machine.emulated(gpus=1, nbytes=nbytes)
        return asc.fuse(graph, machine, policy="single", examples=examples)

    with asc.schedule(fused(1e9), GPUS, policy="single", examples=examples) as schedule:
        peak = schedule.peak_bytes["cuda:0"]
    assert regions(fused(peak + 12_000))
    tight = fused(peak + 11_999)
    assert not regions(tight)
    why = "memory of cuda:0 has no room for copies, to compare results"
    assert {*tight.not_fused.values()} == {why}


def test_plans_that_repeat_tasks_to_save_memory_are_fused(compiled: Any) -> None:
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(32, 32), nn.GELU())))

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().mean(), [*model.parameters()])

    graph = asc.capture(step, x := torch.rand(4096, 32))
    machine = asc.Machine.emulated(gpus=1)
    peak = asc.schedule(graph, machine, examples=graph.examples, policy="single").peak_bytes
    machine = asc.Machine.emulated(gpus=1, nbytes=0.5 * max(peak.values()))
    plain = asc.schedule(graph, machine, examples=graph.examples)
    assert plain.recomputed
    with asc.fuse(plain) as fused:
        assert regions(fused.graph)
        assert all(map(torch.equal, fused(x).values(), step(x)))
    assert regions(asc.fuse(graph, machine))


# ---- on a real machine


def least_at(place: int) -> Callable[..., list[float]]:
    """Return run times of which one is least."""
    return lambda schedules, inputs: [
        float(i != place % len(schedules)) for i in range(len(schedules))
    ]


def test_on_a_real_machine_the_fastest_is_taken_and_inputs_stay(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosched.fusion.fusing.run_times", least_at(0))
    examples = inputs()
    state = torch.random.get_rng_state()
    graph = asc.fuse(chain(), CPU, examples=examples)
    assert_same(examples, inputs())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert compiled
    assert all(task.seconds for task in graph.tasks if task.operators)
    assert_same(outcome(graph.run_serial), outcome(chain().run_serial))


def test_a_region_that_computes_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(graph: torch.fx.GraphModule, args: Any, threads: int) -> Any:
        return lambda *values: [item * 1.5 for item in graph(*values)]

    monkeypatch.setattr("autosched.fusion.fusing.run_times", least_at(0))
    examples = inputs()
    with compiled_by(wrong), pytest.warns(RuntimeWarning, match="compiled kernels differ"):
        graph = asc.fuse(chain(), CPU, examples=examples)
    assert not regions(graph)
    assert "compiled kernels differ" in graph.not_fused["own"]
    assert_same(examples, inputs())
    assert_same(outcome(graph.run_serial), outcome(chain().run_serial))


def test_a_line_says_how_far_compiling_is(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autosched.fusion.fusing.run_times", least_at(0))
    asc.fuse(chain(), CPU, examples=inputs(), progress=False)
    assert capsys.readouterr().err == ""
    asc.fuse(chain(), CPU, examples=inputs())
    line = "fusing 'chain': 0 of 2 regions, about 4 s; ends sooner if Inductor's cache is kept\n"
    assert capsys.readouterr().err == line


def test_objects_that_a_graph_holds_are_not_changed(compiled: Any) -> None:
    held = torch.zeros(3)
    norm = nn.BatchNorm1d(3)
    graph = asc.Graph()
    x = graph.input("x")
    count = graph.constant(held, "count")
    count.add_(1)
    graph.output(y=(x * 2 + count).sin())
    asc.fuse(graph, CPU, examples={"x": torch.ones(3)})
    assert held.tolist() == [0.0, 0.0, 0.0]
    stateful = asc.Graph()
    x = stateful.input("x")
    stateful.output(y=(stateful.add(norm, x * 2) + 1).sin())
    asc.fuse(stateful, CPU, examples={"x": torch.rand(2, 3)})
    assert norm.num_batches_tracked == 0


def test_an_option_that_is_no_compiler_is_refused() -> None:
    with pytest.raises(
        asc.ScheduleError, match=r"fuse must be True, False or a function .*, got 'yes'"
    ):
        asc.compile(own, fuse="yes")  # type: ignore[arg-type]


def test_fused_graphs_can_be_copied(compiled: Any) -> None:
    graph = asc.fuse(chain(), GPUS, policy="single")
    again = copy.deepcopy(graph)
    assert str(again) == str(graph)
    assert again.not_fused == graph.not_fused
    assert_same(outcome(again.run_serial), outcome(graph.run_serial))


# ---- what takes graphs and schedules


def test_fused_graphs_can_be_pickled(compiled: Any) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x + 1) * 2)
    again = pickle.loads(pickle.dumps(asc.fuse(graph, GPUS)))
    assert len(regions(again)) == 1
    assert again.run_serial(x=torch.ones(2))["y"].tolist() == [4.0, 4.0]


def test_schedules_of_fused_graphs_can_be_saved(compiled: Any, tmp_path: Path) -> None:
    graph = asc.fuse(chain(), GPUS, policy="single")
    with asc.schedule(graph, GPUS, policy="heft", backend="host") as schedule:
        schedule.save(tmp_path / "saved.json")
        with asc.load(tmp_path / "saved.json", graph) as again:
            assert again.program == schedule.program
            assert again.makespan == pytest.approx(schedule.makespan)
            assert_same(outcome(again), outcome(schedule))
            assert again.not_fused == schedule.not_fused


def test_everything_shows_regions_and_their_operators(compiled: Any, tmp_path: Path) -> None:
    graph = asc.fuse(chain(), GPUS, policy="single")
    first = graph.tasks[0].name
    with asc.schedule(graph, GPUS, policy="heft", backend="virtual") as schedule:
        schedule.verify()
        assert schedule.simulate().makespan == pytest.approx(schedule.makespan)
        assert schedule.peak_bytes
        timeline = schedule.profile(**inputs())
        assert {span.name for span in timeline.spans if span.kind == "run"} == {
            task.name for task in graph.tasks
        }
        found = schedule.explain(first)
        assert found.operators == ("matmul", "add", "relu", "mul", "mul_1", "add_1")
        assert "  calls  'matmul', 'add', 'relu', 'mul', 'mul_1' and 'add_1'" in str(found)
        assert str(schedule.explain())
        data = page_data(graph, schedule.program, {"predicted": timeline}, {})
        calls = dict(zip(data["name"], data["calls"], strict=True))
        assert calls[first] == "matmul, add, relu, mul, mul_1, add_1"
        assert calls["noise"] == ""
        assert schedule.page()
        events = json.loads(perfetto_json(timeline, graph=graph))["traceEvents"]
        shown = {event["name"]: event["args"] for event in events if event["ph"] == "X"}
        assert shown[first]["calls"] == "matmul, add, relu, mul, mul_1, add_1"
        assert "calls" not in shown["noise"]
        for name in ("drawn.svg", "drawn.pdf"):
            schedule.draw(tmp_path / name)
            assert (tmp_path / name).stat().st_size


def test_generated_code_has_regions_as_functions_to_compile(compiled: Any) -> None:
    graph = asc.fuse(chain(), GPUS, policy="single")
    schedule = asc.schedule(graph, GPUS, policy="heft")
    assert schedule.code.count("@torch.compile") == 2
    with torch.compiler.set_stance("force_eager"):
        found = outcome(lambda **given: run(schedule, given))
    assert_same(found, outcome(chain().run_serial))


def test_code_of_regions_that_cannot_be_written_takes_them_as_arguments(compiled: Any) -> None:
    scale = torch.nn.Parameter(torch.ones(1)).item()
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(lambda x: x * scale, x + 1) * 2)
    schedule = asc.schedule(asc.fuse(graph, GPUS), GPUS)
    assert "@torch.compile" not in schedule.code
    assert len(schedule.code.given) == 1
    assert run(schedule, {"x": torch.ones(2)})["y"].tolist() == [4.0, 4.0]


@needs_compiler
@pytest.mark.slow
def test_generated_code_runs_by_itself() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x + 1).relu() * 2)
    schedule = asc.schedule(asc.fuse(graph, CPU), CPU)
    assert "@torch.compile" in schedule.code
    printed = fresh(schedule.code, "print(step(x=torch.ones(2))['y'].tolist())")
    assert printed.strip() == "[4.0, 4.0]"


def test_a_step_that_creates_an_optimizers_state_is_not_fused(
    compiled: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with asc.compile(stepper(model, optimizer), CPU, fuse=True) as run:
        run(torch.ones(4, 3))
        assert not compiled
        assert "begins at its second call" in capsys.readouterr().err
        run(torch.ones(4, 3))
        assert compiled


# ---- schedules that are compared by running them leave inputs and random numbers as they were


def test_inputs_and_random_numbers_stay_as_they_are() -> None:
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    x.add_(torch.rand_like(y))
    x[:1].mul_(2)
    graph.output(z=x * y)
    inputs = {"x": torch.ones(3), "y": torch.ones(3)}
    state = torch.random.get_rng_state()
    machine = asc.Machine.local(gpus=0)
    with (
        asc.schedule(graph, machine, policy="single") as one,
        asc.schedule(graph, machine, policy="heft") as other,
    ):
        taken = run_times([one, other], inputs)
    assert len(taken) == 2
    assert all(seconds > 0 for seconds in taken)
    assert inputs["x"].tolist() == inputs["y"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_each_run_begins_with_the_same_state_which_requires_the_same_gradients() -> None:
    seen: list[tuple[float, bool]] = []

    def note(counter: torch.Tensor) -> torch.Tensor:
        seen.append((counter.item(), counter.requires_grad))
        return counter.detach() + 1

    graph = asc.Graph()
    counter = graph.input("counter")
    counter.add_(1)
    graph.output(y=graph.add(note, counter))
    with asc.schedule(graph, asc.Machine.local(gpus=0)) as made:
        run_times([made], {"counter": torch.nn.Parameter(torch.zeros(()))})
    assert len(seen) > 3
    assert set(seen) == {(1.0, True)}


# ---- the estimated seconds of regions: what fusion saves, and what it cannot save

GPU = asc.Device("cuda:0", launch_seconds=1e-5)
SIZE = 1024
Build = Callable[[asc.Value], asc.Value]


def seconds(build: Build) -> tuple[float, float]:
    """Return the seconds of a region of these tasks, and their sum."""
    graph = asc.Graph()
    x = graph.input("x")
    y = build(x)
    graph.output(y=y)
    costs = estimate(graph, {"x": torch.empty(SIZE, SIZE, device="meta")}).costs
    composite = Composite(graph.tasks, [x.index], [y.index])
    tasks = sum(costs.task_seconds(task, GPU) for task in graph.tasks)
    return region_seconds(composite, graph.values, costs, GPU), tasks


def test_operators_around_a_product_are_launched_before_and_after_it() -> None:
    found, alone = seconds(lambda x: (((x + 1) * 2) @ x).sin().cos())
    product, _ = seconds(lambda x: x @ x)
    one, _ = seconds(lambda x: x + 1)
    assert product < found < alone
    assert found == pytest.approx(product + 2 * one, rel=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.t() + 1,
        lambda x: x.sum(),
        lambda x: (x + 1).relu_().mul_(2),
        lambda x: torch.softmax(x @ x, 0) + x,
    ],
)
def test_a_region_never_takes_longer_than_its_tasks(build: Build) -> None:
    found, alone = seconds(build)
    assert 0 < found <= alone


def test_a_region_may_take_less_time_than_the_memory_traffic_of_its_tasks() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=((x + 1) * 2).sin())
    merged = asc.merge(graph, {"add": "all", "mul": "all", "sin": "all"})
    with compiled_by():
        fused = asc.fuse(graph, asc.Machine.emulated(gpus=1))
    costs = estimate(graph, {"x": torch.empty(SIZE, SIZE, device="meta")}).costs
    ((task,), (region,)) = merged.tasks, fused.tasks
    assert least_work(task, costs) == work_of(task, costs) == work_of(region, costs)
    assert least_work(region, costs) == asc.Work(3 * SIZE**2, 0)
    assert least_work(region, asc.Costs()) is None
