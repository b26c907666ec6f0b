"""Bugs that once were, each with its story."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.graph.flow import flow, ragged
from autosched.lowering import lower
from autosched.lowering.events import insert_events
from autosched.lowering.hazards import Hazards
from autosched.lowering.resident_state import keeping, with_resident_state
from autosched.placement import Placement
from autosched.program.program import Copy, Free, Run, Stream
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.backends.emulated import Emulated
from autosched.runtime.backends.host import copy_in_host_memory
from autosched.runtime.backends.virtual import Virtual
from autosched.testing.comparing import difference
from tests.sample_policies import placed

MACHINE = asc.Machine.emulated(gpus=2)
SPARSE = torch.eye(3).to_sparse()


def run(
    graph: asc.Graph, backend: Any = "emulated", policy: Any = "single", **inputs: Any
) -> dict[str, Any]:
    with asc.schedule(graph, MACHINE, policy=policy, backend=backend) as schedule:
        return schedule(**inputs)


def refused(what: str, *given: Any, **inputs: Any) -> None:
    with pytest.raises(asc.HazardError, match=what):
        run(*given, **inputs)


def add_one(x: Any) -> None:
    x += 1


def test_random_tasks_kept_no_order_where_the_second_also_wrote_what_the_first_read() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(drawn=graph.add(lambda x: x + torch.rand_like(x), x, random=True, name="drawn"))
    graph.add(
        lambda x: x.copy_(torch.rand_like(x)), x, writes=[x], random=True, name="redrawn", outputs=0
    )
    for seed in range(8):
        backend = Virtual(random.Random(seed).choice)
        torch.manual_seed(0)
        expected = graph.run_serial(x=torch.zeros(2))["drawn"]
        torch.manual_seed(0)
        assert torch.equal(
            run(graph, backend, placed(drawn="cuda:0"), x=torch.zeros(2))["drawn"], expected
        )


def test_two_constants_that_share_memory_were_written_and_read_in_no_order() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    graph = asc.Graph()
    graph.add(torch.Tensor.add_, weight.data, 1.0, name="written")
    graph.output(total=graph.add(torch.sum, weight.data, name="total"))
    refused("'constant' and 'constant_1' share memory", graph)


def test_a_result_that_aliased_the_second_of_two_views_was_freed_with_it_while_in_use() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    view = x.view(2, 3)
    picked = graph.add(lambda x, view: view, x, view, aliases=view, name="picked")
    graph.output(y=graph.add(lambda p: p + 1, picked, name="y"))
    with pytest.raises(
        asc.ScheduleError, match="'picked' is placed on 'cuda:0' but must run on 'cpu'"
    ):
        asc.schedule(graph, MACHINE, policy=placed(picked="cuda:0"))
    assert run(graph, policy="heft", x=torch.arange(6.0))["y"].shape == (2, 3)


def test_a_sparse_tensor_could_not_be_watched() -> None:
    graph = asc.Graph()
    doubled = graph.add(lambda x: x * 2, graph.input("x"), name="doubled")
    graph.output(y=graph.add(lambda x: x * 3, doubled, name="y"))
    result = run(graph, policy=placed(doubled="cuda:0", y="cuda:1"), x=SPARSE)["y"]
    assert torch.equal(result.to_dense(), torch.eye(3) * 6)


def test_an_input_that_is_a_tree_could_not_be_copied_back() -> None:
    def write(x: dict[str, Any]) -> None:
        x["tensors"][0].add_(1)
        x["steps"] += 1

    graph = asc.Graph()
    x = graph.input("x")
    graph.add(write, x, writes=[x], outputs=0, name="write")
    tensor = torch.ones(2)
    given = {"tensors": [tensor], "steps": 3}
    run(graph, policy=placed(write="cuda:0"), x=given)
    assert given["steps"] == 4
    assert given["tensors"][0] is tensor
    assert tensor.tolist() == [2.0, 2.0]


def test_an_array_of_numpy_could_not_be_copied_back() -> None:
    array = torch.ones(2).numpy().copy()
    graph = asc.Graph()
    x = graph.input("x")
    graph.add(add_one, x, writes=[x], outputs=0, name="write")
    run(graph, policy=placed(write="cuda:0"), x=array)
    assert array.tolist() == [2.0, 2.0]


def test_an_input_whose_shape_a_task_changed_elsewhere_came_back_with_the_old_shape() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=x.squeeze_(0))
    with pytest.raises(
        asc.TaskError, match=r"changed its shape to \(3,\), and it lives elsewhere as \(1, 3\)"
    ):
        run(graph, policy=placed(squeeze="cuda:0"), x=torch.ones(1, 3))
    with pytest.raises(ValueError, match="changed how many items the list has"):
        copy_in_host_memory([1], [1, 2])


@pytest.mark.parametrize(
    ("item", "other", "error"),
    [
        ((1, 2), (3, 4), None),  # was not changed
        (
            torch.ones(1),
            torch.ones(1, dtype=torch.int64),
            "Tensor of torch.int64 where",
        ),  # was cast
        (torch.ones(1), 5, "a int where a Tensor of torch.float32 was"),  # raised AttributeError
        ([torch.ones(1)], {"a": 1}, "a dict where a list was"),
        ({"a": 1}, torch.ones(1), "a Tensor of torch.float32 where a dict was"),
    ],
)
def test_what_a_task_put_into_a_list_elsewhere_came_back_as_what_was_there(
    item: Any, other: Any, error: str | None
) -> None:
    def put(items: list[Any]) -> None:
        items[0] = copy.deepcopy(other)

    graph = asc.Graph()
    x = graph.input("x")
    graph.add(put, x, writes=[x], outputs=0)
    given = [item]
    with contextlib.nullcontext() if error is None else pytest.raises(asc.TaskError, match=error):
        run(graph, policy=placed(put="cuda:0"), x=given)
    assert given == [item if error else other]


def test_what_a_task_put_into_a_list_was_freed_with_the_argument_that_it_was() -> None:
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    doubled = y * 2
    graph.add(operator.setitem, x, 0, doubled, writes=[x], outputs=0, name="put")
    refused("put 'mul' into 'x', which it writes; put a clone", graph, x=[0], y=torch.ones(2))


def test_a_parameter_asked_for_no_gradient_where_it_was_copied_to() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad((x**2).sum(), x)[0]

    graph = asc.Graph()
    graph.output(y=graph.add(gradient, torch.nn.Parameter(torch.ones(2)), name="gradient"))
    assert run(graph, policy=placed(gradient="cuda:0"))["y"].tolist() == [2.0, 2.0]


def test_a_dropout_that_drops_was_taken_for_a_view_which_kept_what_was_written_behind_it_at_home() -> (
    None
):
    graph = asc.Graph()
    dropped = graph.add(torch.nn.functional.dropout, graph.input("x"), on="cuda:0")
    graph.output(y=graph.add(torch.relu_, dropped, on="cuda:0"))
    assert "cuda:0/compute  run relu" in str(asc.schedule(graph, MACHINE))


def test_an_array_that_shares_memory_with_a_tensor_was_read_after_that_was_freed() -> None:
    graph = asc.Graph()
    doubled = graph.add(lambda x: x * 2, graph.input("x"), name="doubled")
    graph.output(y=graph.add(lambda a: a + 1, doubled.numpy()))
    assert run(graph, x=torch.ones(2))["y"].tolist() == [3.0, 3.0]


def test_the_weights_of_a_bare_batch_norm_were_taken_for_its_statistics() -> None:
    graph = asc.Graph()
    x, weight, bias, mean, var = graph.inputs("x", "weight", "bias", "mean", "var")
    torch.batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5, False)  # type: ignore[arg-type]
    graph.add(
        torch.ops.aten.native_batch_norm, x, weight, bias, mean, var, True, 0.1, 1e-5, outputs=3
    )
    for task in graph.tasks:
        assert [graph.values[use.value].name for use in task.writes] == ["mean", "var"]


def test_im2col_was_taken_for_a_view_that_costs_nothing() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    torch.nn.functional.unfold(x, 2)  # type: ignore[arg-type]
    x.unfold(0, 2, 1)
    assert [task.view for task in graph.tasks] == [False, True]


@pytest.mark.parametrize(
    "fn",
    [
        torch.nn.init.kaiming_uniform_,
        torch.nn.Dropout2d(),
        torch.nn.RReLU(),
        torch.nn.LSTM(2, 2, num_layers=2, dropout=0.5),
        torch.nn.MultiheadAttention(2, 1, dropout=0.5),
    ],
)
def test_functions_that_draw_random_numbers_under_less_known_names_kept_no_order(
    fn: Callable[..., Any],
) -> None:
    graph = asc.Graph()
    for name in ("x", "y"):
        graph.add(fn, graph.input(name))
    assert [tuple(d) for d in graph.tasks[1].dependencies] == [(0, "order")]


def test_adding_in_place_to_a_number_did_nothing_at_all() -> None:
    graph = asc.Graph()
    n = graph.add(lambda x: x + 1, graph.input("x"))
    n += 1
    graph.output(n=n)
    with pytest.raises(TypeError, match="6 is a int, which __iadd__ cannot change in place"):
        graph.run_serial(x=5)
    with pytest.raises(asc.TaskError, match="task 'iadd' on cpu failed"):
        run(graph, x=5)


def test_copies_without_copy_streams_were_not_waited_for_on_real_devices() -> None:
    machine = asc.Machine([asc.Device("cpu"), asc.Device("cuda:0")], contention=False)
    with pytest.raises(asc.MachineError, match="without contention is for planning"):
        Accelerator().open(asc.Program(()), machine)


def test_a_view_with_gaps_keeps_its_strides_on_another_device_so_that_sums_have_the_same_bits():
    graph = asc.Graph()
    x = graph.input("x")
    strided = x[:, ::3]
    graph.output(total=graph.add(lambda v: v.sum(1), strided, on="cuda:0"))
    x = torch.rand(7, 3001, generator=torch.Generator().manual_seed(0))
    with asc.schedule(graph, asc.Machine.emulated(gpus=1)) as schedule:
        assert torch.equal(schedule(x=x)["total"], graph.run_serial(x=x)["total"])


def test_a_backend_that_cannot_set_up_its_threads_says_so_instead_of_waiting_for_ever():
    class Unfit(Emulated):
        def prepare(self) -> None:
            raise OSError("no such core")

    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    made = asc.schedule(graph, asc.Machine.emulated(gpus=1), backend=Unfit())
    with pytest.raises(OSError, match="no such core"):
        made(x=1)


@pytest.mark.parametrize("label", ["a b", "", "a@1", "a\x1cb", "\x85", "\u2028"])
def test_an_output_could_have_a_name_that_the_text_of_a_program_cannot_carry(label: str) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    with pytest.raises(
        asc.GraphError, match="the name of an output must be a string without spaces and '@', got "
    ) as e:
        graph.output(**{"fine": x, label: x})
    assert str(e.value).endswith(repr(label))
    assert graph.outputs == {}


NAMES = st.text(max_size=4) | st.sampled_from(
    "\x00 \x1c \x1fa \x85 a\u2028b \u200b \ufeff \ud800 # -> <- @ @1 a@1 / a/b e0 on run copy input overwriting".split(
        " "
    )
)


@given(source=NAMES, device=NAMES | st.just("cpu"))
def test_names_that_graphs_and_machines_take_are_names_that_the_text_of_a_program_carries(
    source: str, device: str
) -> None:
    task, label, cpu, gpu = f"{source}=", source, device, f"{device}0"
    graph = asc.Graph()
    try:
        y = graph.add(abs, graph.input(source), name=task, on=gpu)
        graph.add(add_one, y, writes=[y], on=cpu, outputs=0)
        graph.output(**{label: y})
        machine = asc.Machine([asc.Device(cpu), asc.Device(gpu)], [asc.Link(cpu, gpu, 1e9)])
        program = asc.schedule(graph, machine, inputs=gpu, outputs=gpu).program
    except (asc.GraphError, asc.MachineError):
        return
    assert asc.Program.parse(str(program)) == program


TOO_MUCH: list[Any] = [math.inf, math.nan, -1, 10**400, True, "8"]


@pytest.mark.parametrize("nbytes", TOO_MUCH)
def test_bytes_that_are_no_finite_number_led_policies_astray_and_made_times_that_are_no_numbers(
    nbytes: Any,
) -> None:
    graph = asc.Graph()
    with pytest.raises(
        asc.GraphError, match="nbytes of task 'a' must be a number, 0 or more, and finite, got "
    ):
        graph.add(abs, graph.input("x"), name="a", nbytes=nbytes)
    with pytest.raises(
        asc.ScheduleError, match="nbytes of 'a' must be a number, 0 or more, and finite, got "
    ):
        asc.Costs.table({}, {"a": nbytes})


@pytest.mark.parametrize("seconds", [math.inf, {"cpu": math.inf}, {"cuda:7": 1.0}])
def test_a_task_that_can_run_nowhere_is_named(seconds: Any) -> None:
    graph = asc.Graph()
    graph.output(a=graph.add(abs, graph.input("x"), name="a", seconds=seconds))
    with pytest.raises(
        asc.ScheduleError, match=r"task 'a' can run nowhere: of 'cpu', .* are finite on none"
    ):
        asc.schedule(graph, MACHINE)


@pytest.mark.parametrize("seconds", TOO_MUCH[1:])
def test_seconds_that_are_no_number_were_found_when_planning_or_never(seconds: Any) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for number in (seconds, {"cpu": 1.0, "cuda:0": seconds}):
        with pytest.raises(asc.GraphError, match="seconds of task 'a' must be numbers, 0 or more"):
            graph.add(abs, x, name="a", seconds=number)


@pytest.mark.parametrize("policy", ["auto", "heft", "single", "round_robin"])
def test_a_copy_that_takes_longer_than_a_float_can_say_is_refused(policy: str) -> None:
    graph = asc.Graph()
    graph.output(a=graph.add(abs, graph.input("x"), name="a", on="cuda:0"))
    machine = asc.Machine(
        [asc.Device("cpu"), asc.Device("cuda:0")], [asc.Link("cpu", "cuda:0", 1e-10)]
    )
    with pytest.raises(asc.ScheduleError, match=r"later than a float can say|take for ever"):
        asc.schedule(graph, machine, policy=policy, costs=asc.Costs(default_nbytes=1e300))


def nested(item: Any, deep: int) -> Any:
    for _ in range(deep):
        item = [item]
    return item


def test_arguments_in_lists_in_lists_ended_the_stack_and_so_did_lists_that_hold_themselves() -> (
    None
):
    graph = asc.Graph()
    x = graph.input("x")
    endless: list[Any] = [x]
    endless += [endless, endless]
    for tree in (nested(x, 1000), {"a": nested(x, 100)}, endless):
        with pytest.raises(
            asc.GraphError, match="task 'a' has arguments nested more than 100 deep"
        ):
            graph.add(len, tree, name="a")
        with pytest.raises(
            asc.GraphError, match="task 'len' has arguments nested more than 100 deep"
        ):
            graph.add(len, items=tree)
        with pytest.raises(asc.GraphError, match="task 'a' has outputs= nested more than 100 deep"):
            graph.add(len, x, name="a", outputs=tree)
    graph.add(lambda tree: tree, nested(x, 100), outputs=nested("y", 100))
    graph.output(graph.value("y"))
    assert run(graph, x=1) == {"y": 1}


def test_a_constant_could_be_asked_for_by_another_name_which_then_named_nothing() -> None:
    graph = asc.Graph()
    tensor = torch.ones(2)
    w = graph.constant(tensor, "w")
    assert graph.constant(tensor) is graph.constant(tensor, "w") is w
    with pytest.raises(
        asc.GraphError, match="the tensor is constant 'w' of graph 'graph' already, got name 'v'"
    ):
        graph.constant(tensor, "v")
    with pytest.raises(
        asc.GraphError, match="a name must be a string without spaces and '@', got ''"
    ):
        graph.constant(torch.ones(3), "")


def test_a_backend_that_two_schedules_were_given_mixed_up_their_clocks_and_events() -> None:
    graph = asc.Graph()
    graph.output(y=graph.input("x") + 1)
    backend = Emulated()
    first, second = (asc.schedule(graph, MACHINE, backend=backend) for _ in range(2))
    assert first(x=1) == {"y": 2}
    for _ in range(2):
        with pytest.raises(
            asc.ScheduleError,
            match=r"Emulated.* serves another schedule, which is not closed; make a",
        ):
            second(x=1)
    assert first(x=1) == {"y": 2}
    first.close()
    with second:
        assert second(x=1) == {"y": 2}


def simple() -> asc.Graph:
    graph = asc.Graph()
    graph.output(y=graph.add(abs, graph.input("x"), name="a"))
    return graph


@pytest.mark.parametrize(
    ("option", "item", "message"),
    [
        ("costs", {"a": 1.0}, r"costs must be Costs, or None for a guess, got \{'a': 1.0\}"),
        ("examples", 3, "examples must be an input of each name, as a mapping, got 3"),
        ("examples", {1: 2}, "misses input 'x'|was given 1"),
        ("inputs", ["x"], r"inputs must be a device, or a mapping with one for each input, got \['x'\]"),
        ("outputs", [], r"outputs must be a device, or a mapping with one for each output, got \[\]"),
        ("outputs", {"y": ["cpu"]}, r"the machine has no device \['cpu'\]"),
        ("backend", 3, "backend must be a name, or an object with the methods of .*Backend, got 3"),
        ("backend", Emulated, "backend must be a name, or an object .*, got <class "),
        ("policy", ["heft"], r"unknown policy \['heft'\]; known are 'auto', "),
        ("policy", lambda *_: asc.Placement({"a": "cpu"}, 3), "a placement is a table of devices"),  # type: ignore[arg-type]
        ("policy", lambda *_: asc.Placement(None, ("a",)), "a placement is a table of devices"),  # type: ignore[arg-type]
        ("policy", lambda *_: asc.Placement({"a": []}, ("a",)), r"the machine has no device \[\]"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_arguments_of_another_kind_ended_schedule_with_an_error_of_pythons(
    option: str, item: Any, message: str
) -> None:
    with pytest.raises(asc.AutoschedError, match=message):
        asc.schedule(simple(), MACHINE, **{option: item})


def test_what_is_no_program_is_said_to_be_none() -> None:
    with pytest.raises(
        asc.ProgramError,
        match=r"verify needs a Program, got 'cpu/compute  run a'; Program.parse reads",
    ):
        asc.verify("cpu/compute  run a", simple())  # type: ignore[arg-type]


def test_writes_and_after_that_are_no_lists_and_names_that_are_no_strings_ended_with_an_error_of_pythons() -> (
    None
):
    graph = asc.Graph()
    x = graph.input("x")
    with pytest.raises(asc.GraphError, match="writes= needs one item or a list of them, got None"):
        graph.add(abs, x, writes=None)
    with pytest.raises(asc.GraphError, match="after= needs one item or a list of them, got 3"):
        graph.add(abs, x, after=3)
    for look in (graph.task, graph.value):
        with pytest.raises(asc.GraphError, match=r"has no (task|value) \['x'\]"):
            look(["x"])  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("option", "item", "message"),
    [
        ("examples", None, "examples must be an input of each name, as a mapping, got None"),
        ("policies", "auto", "policies must be a list of names and functions, got 'auto'"),
        ("interleavings", 0, "interleavings must be a whole number, 1 or more, got 0"),
        ("seed", -1, r"seed must be a whole number, 0 to 2\*\*63 - 1, got -1"),
        ("graph", None, "graph must be a Graph, got None"),
    ],
)
def test_arguments_of_another_kind_ended_a_check_with_an_error_of_pythons(
    option: str, item: Any, message: str
) -> None:
    given: dict[str, Any] = {"graph": simple(), "examples": {"x": torch.ones(1)}, option: item}
    with pytest.raises(asc.AutoschedError, match=message):
        asc.testing.check(**given)


def test_a_wait_for_what_is_not_recorded_ended_the_simulation_with_a_key_error() -> None:
    program = asc.Program.parse("cpu/compute  wait e3\ncpu/compute  record e3")
    with pytest.raises(
        asc.ProgramError, match="cpu/compute waits for e3, which is not recorded before"
    ):
        asc.simulate(program, asc.Problem(simple(), MACHINE))


def test_rows_were_taken_to_be_apart_from_what_were_columns_before_a_transposition_in_place() -> (
    None
):
    graph = asc.Graph()
    x = graph.input("x")
    upper = x[:2]
    same = x.contiguous()
    same.t_()
    right = x[2:]
    upper.add_(1)
    right.mul_(2)
    assert graph.task("add").index in [d.task for d in graph.task("mul").dependencies]


@pytest.mark.parametrize("name", ["set_", "resize_", "as_strided_"])
def test_a_view_that_is_moved_to_other_memory_is_refused(name: str) -> None:
    graph = asc.Graph()
    row = graph.input("x")[0]
    with pytest.raises(asc.GraphError, match=f"{name} gives value 'getitem' other memory"):
        getattr(row, name)(graph.input("y"))
    assert len(graph) == 1


def twice(x: Any) -> list[Any]:
    y = x + 1
    return [y, y[1:]]


def test_a_list_of_tensors_that_share_memory_was_written_as_if_they_were_apart() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    x[0].add_(1)
    x[1].mul_(2)
    tensor = torch.ones(3)
    refused(
        "tensors in 'x' share memory with each other, and it is written",
        graph,
        x=[tensor, tensor[1:]],
    )
    refused(
        "tensors in 'x' share memory with each other, and it is written",
        graph,
        x=[tensor.numpy(), tensor.numpy()],
    )
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    run(graph, x=[tensor[:1], tensor[1:]])


def test_tensors_that_share_memory_came_apart_where_they_were_copied_to_be_written() -> None:
    def change(tensors: list[Any]) -> None:
        tensors[0].add_(1)
        tensors[1].mul_(2)

    graph = asc.Graph()
    graph.add(change, graph.input("x"), writes=[graph.value("x")], outputs=0, name="change")
    tensor = torch.ones(3)
    run(graph, x=[tensor, tensor])
    assert tensor.tolist() == [4.0, 4.0, 4.0]
    refused(
        "tensors in 'x' share memory with each other",
        graph,
        policy=placed(change="cuda:0"),
        x=[tensor, tensor],
    )


def test_a_task_that_returns_tensors_that_share_memory_as_one_value_must_not_have_them_written() -> (
    None
):
    graph = asc.Graph()
    made = graph.add(twice, graph.input("x"))
    graph.output(y=made[0])
    assert run(graph, x=torch.ones(2))["y"].tolist() == [2.0, 2.0]
    made[1].add_(1)
    refused(
        "'twice' returned 'twice', which is written, with tensors that share",
        graph,
        x=torch.ones(2),
    )


ARRAY = torch.zeros(4).numpy()


@pytest.mark.parametrize("x", [ARRAY[:3], torch.from_numpy(ARRAY)[:3], ARRAY[2::-1]])
def test_arrays_that_share_memory_were_written_all_the_same(x: Any) -> None:
    graph = asc.Graph()
    x_, y_ = graph.inputs("x", "y")
    graph.add(add_one, x_, writes=[x_], outputs=0)
    graph.output(y=y_)
    refused("'x' and 'y' share memory", graph, x=x, y=ARRAY[2:])
    run(graph, x=ARRAY[:2], y=ARRAY[2:])


def test_what_a_task_did_to_an_array_and_did_not_declare_was_not_found() -> None:
    graph = asc.Graph()
    graph.add(add_one, graph.input("x"), outputs=0)
    refused("wrote its argument 'x' in place without declaring it", graph, x=ARRAY.copy())
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(lambda x: x[1:], x, name="rest"))
    run(graph, x=ARRAY.copy())  # nothing is written, and no one frees an array that is in use
    graph.add(add_one, x, writes=[x], outputs=0)
    refused("result 'rest' of task 'rest' shares memory with 'x'", graph, x=ARRAY.copy())


def test_a_tensor_of_inference_mode_has_no_version_and_was_not_watched() -> None:
    graph = asc.Graph()
    graph.add(torch.inference_mode()(add_one), graph.input("x"), outputs=0)
    with torch.inference_mode():
        x = torch.ones(2)
    refused("wrote its argument 'x' in place without declaring it", graph, x=x)


def test_views_of_slices_of_one_storage_were_taken_for_each_other() -> None:
    graph = asc.Graph()
    a, b = graph.inputs("a", "b")
    a.view_as(b).add_(1)
    b.mul_(2)
    flat = torch.ones(4)
    run(graph, a=flat[:2], b=flat[2:])
    assert flat.tolist() == [2.0, 2.0, 2.0, 2.0]


def test_a_task_that_transposed_its_argument_in_place_misled_those_that_touch_parts_of_it() -> None:
    def transpose(x: Any) -> None:
        x.t_()

    graph = asc.Graph()
    x = graph.input("x")
    upper = x[:2]
    graph.add(transpose, x, writes=[x], outputs=0)
    upper.add_(1)
    x[2:].mul_(2)
    refused("task 'transpose' changed the shape of 'x' in place", graph, x=torch.ones(4, 3))


@pytest.mark.filterwarnings("ignore")  # torch means to drop quantized tensors
def test_a_quantized_tensor_crashed_the_interpreter_when_its_bytes_were_compared() -> None:
    graph = asc.Graph()
    graph.output(y=graph.input("x").dequantize())
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with asc.schedule(graph, MACHINE, check="bytes") as schedule:
        assert schedule(x=quantized)["y"].tolist() == [1.0, 1.0, 1.0]
    asc.testing.check(graph, examples={"x": quantized}, interleavings=2)


def test_sparse_tensors_that_differ_could_not_be_compared_in_words() -> None:
    assert difference(SPARSE, SPARSE * 3) == "differs in 3 of 9 numbers, by up to 2"


def test_a_list_as_an_index_was_taken_for_a_view_which_is_a_copy() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.add(add_one, x[[0, 1]], name="add_one", writes=[graph.value("getitem")], outputs=())
    z = x + 0
    graph.output(z)
    assert [dependency.task for dependency in graph.task("add").dependencies] == []
    assert graph.last_version(x.index) == 0


def test_at_the_end_no_wait_is_left_out_that_only_a_left_out_one_implied() -> None:
    """A block that three streams used, of which each seemed to be waited for along with the next, was never freed."""
    owner, a, b, c = [Stream(device, "compute") for device in "oabc"]
    instructions = [
        Run(owner, "make"),
        Run(a, "use"),
        Copy(b, "x", 0, "b", "c", also=c),  # the clocks of both meet, without an event
        Run(c, "use again"),
        Run(b, "other"),
    ]
    after = [[], [0], [0], [0], [1]]  # so b is behind a's use in the end, and c is not
    hazards = Hazards(*ragged(after), ["x"], [0], [owner], *ragged([[1, 2, 3]]))
    found = insert_events(instructions, hazards)
    assert [str(i) for i in found[-5:-1]] == ["record e2", "wait e2", "record e3", "wait e3"]
    assert found[-1] == Free(owner, "x", 0)


@pytest.mark.parametrize("made", [False, True])
def test_as_strided_counted_in_the_memory_of_a_copy(made: bool) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    if made:
        x = graph.add(lambda x: (x + 0)[8:18], x, name="part", on="cpu")
    graph.output(y=graph.add(torch.as_strided_copy, x, (2,), (1,), 8, on="cuda:0"))
    whole = torch.arange(20.0)
    refused(
        "begins at element 8 of its memory, from which as_strided counts",
        graph,
        x=whole if made else whole[8:18],
    )


def test_as_strided_counts_in_the_memory_of_a_copy_as_in_what_was_copied() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        x.add_(1)
        graph.output(y=x.as_strided((2,), (1,), 8) + 0, z=x[3:].as_strided((2,), (2,)) + 0)
    refused(
        r"'x' has gaps in memory \(strides \(2,\)\) that as_strided may read",
        graph,
        x=torch.arange(20.0)[::2],
    )
    found = run(graph, x=torch.arange(20.0)[8:18].clone())
    assert (found["y"].tolist(), found["z"].tolist()) == ([17.0, 18.0], [12.0, 14.0])


def test_what_was_read_of_an_empty_part_did_not_wait_for_another_shape() -> None:
    graph = asc.Graph()
    rows = graph.input("x")[:2]
    nothing = rows[3:]
    rows.t_()
    graph.output(nothing=graph.add(torch.clone, nothing), rows=rows.clone())
    assert (graph.task("getitem_1").index, "anti") in graph.task("t").dependencies
    asc.testing.check(graph, examples={"x": torch.randn(4, 6)}, interleavings=3)


def test_an_empty_part_that_gets_another_shape_is_read_in_that_shape() -> None:
    graph = asc.Graph()
    nothing = graph.input("x")[2:2]
    nothing.t_()
    graph.output(nothing=nothing.clone())
    assert graph.task("t").index in [d.task for d in graph.task("clone").dependencies]
    asc.testing.check(graph, examples={"x": torch.randn(4, 6)}, interleavings=3)


def test_views_of_what_got_other_strides_in_place_are_no_hazard() -> None:
    graph = asc.Graph()
    y = graph.input("x") + 0
    y.as_strided_((3, 2), (1, 3))
    graph.output(row=y[0].clone())
    asc.testing.check(graph, examples={"x": torch.randn(2, 3)}, interleavings=3)
    with asc.schedule(graph, MACHINE, check=True) as schedule:
        assert schedule(x=torch.arange(6.0).reshape(2, 3))["row"].tolist() == [0.0, 3.0]


def test_a_graph_with_further_inputs_had_the_producers_and_readers_of_the_one_before() -> None:
    graph = asc.Graph()
    w = graph.input("w")
    graph.output(a=graph.add(torch.sin, w, name="a"), b=graph.add(torch.cos, w, name="b"))
    problem = keeping(asc.Problem(graph, asc.Machine.emulated(gpus=2)), ["w"])
    assert flow(problem.graph).reads.tolist() == [0, 0]
    placement = Placement({"a": "cuda:0", "b": "cuda:1"}, ("a", "b"))
    problem, placement = with_resident_state(problem, placement)  # with a further input, w.cuda:1
    asc.verify(lower(problem, placement), problem)


def test_of_writes_that_came_early_none_is_forgotten_when_an_earlier_one_comes() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for row in range(4):
        graph.add(add_one, x[row], name=f"add{row}", writes=[graph.values[-1]], outputs=())
    graph.output(y=x + 0)
    views = [task.name for task in graph.tasks if task.view]
    order = (*views, "add1", "add3", "add0", "add2", "add")
    machine = asc.Machine.emulated(gpus=1)
    device = {name: "cuda:0" if name == "add" else "cpu" for name in order}
    problem = asc.Problem(graph, machine)
    asc.verify(lower(problem, Placement(device, order)), problem)
