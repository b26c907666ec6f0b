"""Code: what a schedule says as plain PyTorch source does what the schedule does."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
import subprocess
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import autosched as asc
from autosched.codegen import generate
from autosched.program.program import Program, Wait
from autosched.testing.comparing import difference

ONE_GPU, TWO_GPUS = asc.Machine.emulated(gpus=1), asc.Machine.emulated(gpus=2)
CPU = asc.Machine.emulated(gpus=0)
ROOT = Path(__file__).parents[2]


def on_cpu(text: str) -> str:
    """Do what the text's comment says: make each device the CPU."""
    return re.sub(r'^(\w+ = torch\.device)\(".*"\)$', r'\1("cpu")', text, flags=re.MULTILINE)


def loaded(text: str) -> dict:
    names = {"__name__": "generated"}
    exec(compile(text, "<generated>", "exec"), names)
    return names


def parameters(graph, text):
    """Return the parameters of ``step`` by the names that inputs have in the graph."""
    count = len(graph.input_names)
    found = re.search(r"^def step\((.*?)\):", text, re.DOTALL | re.MULTILINE)[1]
    return dict(
        zip(graph.input_names, [name.strip() for name in found.split(",")][:count], strict=True)
    )


def run(schedule, inputs):
    code, words = schedule.code, parameters(schedule.graph, schedule.code)
    step = loaded(on_cpu(code))["step"]
    return step(**{words[name]: item for name, item in inputs.items()}, **code.given)


def body(code):
    return textwrap.dedent(code[code.index('    """Run once') :].partition("\n")[2])


def fresh(text, lines):
    """Run text and then lines in a process that has no autosched."""
    script = (
        'import sys\nsys.modules["autosched"] = None\n' + text + "\n\n" + textwrap.dedent(lines)
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def two_layers():
    graph = asc.Graph("two layers")
    x, w1, w2 = graph.inputs("x", "w1", "w2")
    with graph.on("cuda:0"):
        h = torch.relu(x @ w1)
    with graph.on("cuda:1"):
        graph.output(y=h @ w2)
    return asc.schedule(graph, TWO_GPUS)


# ---- the text


def without_helpers(text):
    """Leave out the class and the functions that are in all modules alike."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name != "step":
            del lines[node.lineno - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines))


def test_a_small_program_reads_like_this():
    assert without_helpers(two_layers().code) == TWO_LAYERS


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda g, x, y: x @ y, "t = x @ y"),
        (lambda g, x, y: 2 - x, "t = 2 - x"),
        (lambda g, x, y: g.add(pow, -2.0, x), "t = pow(-2.0, x)"),
        (lambda g, x, y: (-2.0) ** x, "t = (-2.0) ** x"),
        (lambda g, x, y: -x, "t = -x"),
        (lambda g, x, y: abs(x), "t = abs(x)"),
        (lambda g, x, y: x < y, "t = x < y"),
        (lambda g, x, y: x.T, "t = x.T"),
        (lambda g, x, y: x.relu(), "t = x.relu()"),
        (lambda g, x, y: x.sum(dim=0, keepdim=True), "t = x.sum(dim=0, keepdim=True)"),
        (lambda g, x, y: x[1:], "t = x[1:]"),
        (lambda g, x, y: x[..., None, ::2, -1], "t = x[..., None, ::2, -1]"),
        (lambda g, x, y: x[(1,)], "t = x[1,]"),
        (lambda g, x, y: x[1, (0, 2)], "t = x[1, (0, 2)]"),
        (lambda g, x, y: x[[0, 1], y], "t = x[[0, 1], y]"),
        (lambda g, x, y: x[slice(None)], "t = x[:]"),
        (lambda g, x, y: x.to("cpu"), "t = x"),
        (lambda g, x, y: x.to(torch.float64), "t = x.to(torch.float64)"),
        (lambda g, x, y: torch.relu(x), "t = torch.relu(x)"),
        (lambda g, x, y: torch.cat([x, y], dim=0), "t = torch.cat([x, y], dim=0)"),
        (lambda g, x, y: torch.nn.functional.linear(x, y), "t = torch.nn.functional.linear(x, y)"),
        (lambda g, x, y: torch.linalg.norm(x, ord=math.inf), 't = torch.linalg.norm(x, ord=float("inf"))'),
        (lambda g, x, y: torch.fft.fft(x), "t = torch.fft.fft(x)"),
        (lambda g, x, y: torch.special.expit(x), "t = torch.special.expit(x)"),
        (lambda g, x, y: g.add(torch.ops.aten.mm.default, x, y), "t = torch.ops.aten.mm.default(x, y)"),
        (lambda g, x, y: g.add(torch.ops.aten.mm, x, y), "t = torch.ops.aten.mm(x, y)"),
        (lambda g, x, y: g.add(torch.Tensor.relu, x), "t = x.relu()"),
        (lambda g, x, y: g.add(torch.Tensor.add, 1, x), "t = torch.Tensor.add(1, x)"),
        (lambda g, x, y: g.add(torch.zeros, (2,), dtype=torch.int8), "t = torch.zeros((2,), dtype=torch.int8)"),
        (
            lambda g, x, y: g.add(torch.empty, torch.Size([2]), device=torch.device("cpu"), layout=torch.strided),
            't = torch.empty(torch.Size([2]), device=torch.device("cpu"), layout=torch.strided)',
        ),
        (lambda g, x, y: g.add(torch.einsum, 'i"j,jk', x, y), "t = torch.einsum('i\"j,jk', x, y)"),
        (lambda g, x, y: g.add(dict, a=x, **{"b c": 1j}), 't = dict(a=x, **{"b c": complex(0.0, 1.0)})'),
        (lambda g, x, y: g.add(dict, **{"class": 1, "None": x}), 't = dict(**{"class": 1, "None": x})'),
        (lambda g, x, y: g.add(dict, x, **{"__debug__": y}), 't = dict(x, **{"__debug__": y})'),
        (lambda g, x, y: g.add(dict, **{"\ufb01": x}), 't = dict(**{"\ufb01": x})'),
        (lambda g, x, y: g.add(max, {"a": x, 2: [()]}, b"", key=None), 't = max({"a": x, 2: [()]}, b"", key=None)'),
        (lambda g, x, y: g.add(math.hypot, x, y), "t = hypot(x, y)"),
        (lambda g, x, y: g.add(Path.with_name, x, "y"), 't = PurePath.with_name(x, "y")'),
    ],
)  # fmt: skip
def test_calls_are_written_as_their_user_would(build, line):
    graph = asc.Graph()
    made = build(graph, *graph.inputs("x", "y"))
    graph.output(out=made)
    lines = body(asc.schedule(graph, CPU).code).splitlines()
    name = made.name
    assert lines[1] in (
        line.replace("t = ", f"{found} = ") for found in (name, f"{name}_", f"{name}_0")
    )


def test_results_are_taken_apart_as_their_shape_says_and_what_nothing_uses_goes():
    graph = asc.Graph()
    x = graph.input("x")
    first, rest = graph.add(
        nested, x, outputs=("first", [{"low": "low", "high": ["high", "unused"]}])
    )
    graph.add(torch.aminmax, x, outputs=["a", "b"])
    x + 1
    (only,) = graph.add(torch.split, x, 9, outputs=["only"])
    graph.output(first, rest[0]["low"], rest[0]["high"][0], only)
    schedule = asc.schedule(graph, CPU)
    assert (
        body(schedule.code)
        == """\
# stream cpu/compute
first, (results,) = nested(x)
low = results["low"]
high, unused = results["high"]
del results
del unused
torch.aminmax(x)
add = x + 1
del add
(only,) = torch.split(x, 9)
return {"first": first, "low": low, "high": high, "only": only}
"""
    )
    inputs = {"x": torch.rand(3)}
    assert difference(graph.run_serial(**inputs), run(schedule, inputs)) is None


def test_views_go_with_their_base_and_copies_of_later_versions_say_so():
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        base = x + 1
        view = base[1:]
        before = view * 2
    there = graph.add(torch.neg, base, on="cuda:1")
    with graph.on("cuda:0"):
        view.mul_(3)
    graph.output(before, there, after=graph.add(torch.sum, base, on="cuda:1"))
    schedule = asc.schedule(graph, TWO_GPUS, outputs="cpu")
    text = body(schedule.code)
    assert "del mul, add, getitem\n" in text
    assert "neg = torch.neg(add_cuda1)\n" in text
    assert "sum_ = torch.sum(add_v1_cuda1)\n" in text
    inputs = {"x": torch.rand(3)}
    assert difference(graph.run_serial(**inputs), run(schedule, inputs)) is None


def test_operators_whose_results_are_wanted_are_functions():
    graph = asc.Graph()
    x = graph.input("x")
    done = graph.add(operator.setitem, x, 0, 1.0, writes=x, outputs="done")
    same = graph.add(operator.iadd, x, 1.0, writes=x, aliases=x, outputs="same")
    graph.output(done, same)
    schedule = asc.schedule(graph, CPU)
    assert "done = setitem(x, 0, 1.0)\nsame = iadd(x, 1.0)" in body(schedule.code)
    assert (
        difference(graph.run_serial(x=torch.zeros(2)), run(schedule, {"x": torch.zeros(2)})) is None
    )


def nested(x):
    return x + 1, [{"low": x - 1, "high": [x * 2, x * 3]}]


# ---- names


def test_names_that_python_or_the_text_has_for_other_things_are_told_apart():
    graph = asc.Graph('a """name""" \\ \n')
    names = [
        "lambda",
        "input",
        "torch",
        "to",
        "step",
        "x.0",
        "x_0",
        "2x",
        "größe",
        "ﬁ",
        "fi",
        "e0",
        "cuda0",
        "copy",
        "🙂",
    ]
    values = graph.inputs(*names)
    total = values[0]
    with graph.on("cuda:0"):
        for value in values[1:]:
            total = total + value
        total = graph.add(torch.sum, total, name="sum")
        total = graph.add(step, graph.add(abs, total, name="class"), name="step.1")
        total = graph.add(step, total, name="step_0", on="cpu")
    graph.output(**{'the_"total"': total})
    schedule = asc.schedule(graph, ONE_GPU)
    assert list(parameters(graph, schedule.code).values()) == (
        "lambda_ input torch_0 to_0 step x_0 x_0_0 _2x größe fi fi_0 e0 cuda0 copy _".split()
    )
    inputs = {name: torch.rand(2) for name in names}
    assert difference(graph.run_serial(**inputs), run(schedule, inputs)) is None
    module = loaded(on_cpu(schedule.code))
    assert module["__doc__"].startswith('a """name""" \\ \\n: 18 tasks on cpu, cuda:0, ')
    assert 'Parameter x_0 is input "x.0" of the graph.' in module["__doc__"]


def step(x):
    return x * 3


# ---- functions


def scaled(x):
    return x * 0.5


def of(*functions, inputs=("x",)):
    graph = asc.Graph("functions")
    values = graph.inputs(*inputs)
    for i, fn in enumerate(functions):
        graph.output(**{f"y{i}": graph.add(fn, *values)})
    return asc.schedule(graph, CPU)


def test_functions_of_modules_are_imported():
    code = of(scaled).code
    assert f"import torch\nfrom {__name__} import scaled\n" in code
    assert "scaled_0 = scaled(x)" in code


def test_what_no_text_can_hold_is_a_keyword_of_step(monkeypatch):
    monkeypatch.setattr(scaled, "__module__", "__main__")  # which nobody can import
    layer, factor, addend = torch.nn.Linear(2, 2), 3.0, torch.ones(2)
    functions = [layer, lambda x: x + 1, lambda x: x * factor, scaled, torch.add]
    graph = asc.Graph("functions")
    x = graph.input("x")
    for i, fn in enumerate(functions):
        graph.output(**{f"y{i}": graph.add(fn, x, *([addend] if fn is torch.add else []))})
    graph.output(y6=graph.add(torch.rand, 1, generator=torch.Generator().manual_seed(3)) * x)
    graph.output(y7=layer(x))
    schedule = asc.schedule(graph, CPU)
    assert list(schedule.code.given) == (
        "Linear_fn lambda_fn lambda_1_fn scaled_fn generator constant constant_1 constant_2".split()
    )
    assert schedule.code.given["Linear_fn"] is layer
    assert "Parameter Linear_fn takes what no text can hold: an object, Linear." in schedule.code
    inputs = {"x": torch.rand(2)}
    expected = graph.run_serial(**inputs)
    schedule.code.given["generator"].manual_seed(3)
    assert difference(expected, run(schedule, inputs)) is None
    with pytest.raises(TypeError, match="missing 8 required keyword-only arguments: 'Linear_fn'"):
        loaded(schedule.code)["step"](**inputs)


def test_dicts_of_other_classes_keep_them():
    graph = asc.Graph()
    x = graph.input("x")
    kept = graph.add(OrderedDict.copy, OrderedDict(a=x, b=x), name="kept")
    graph.output(kept=kept)
    schedule = asc.schedule(graph, CPU)
    assert list(schedule.code.given) == ["kept_fn", "of_its_kind"]
    assert type(run(schedule, {"x": torch.ones(1)})["kept"]) is OrderedDict


def test_partial_functions_are_calls_with_more_arguments():
    from functools import partial

    schedule = of(partial(torch.sum, dim=0))
    assert "= torch.sum(x, dim=0)" in schedule.code


# ---- running


def test_the_same_schedule_gives_the_same_text_and_a_file_has_it(tmp_path):
    two_layers().save_code(tmp_path / "step.py")
    assert (tmp_path / "step.py").read_text(encoding="utf-8") == two_layers().code


def test_a_fresh_process_without_autosched_runs_it():
    torch.manual_seed(3)
    inputs = torch.randn(8, 4), torch.randn(4, 16), torch.randn(16, 2)
    expected = torch.relu(inputs[0] @ inputs[1]) @ inputs[2]
    lines = """
        torch.manual_seed(3)
        torch.set_num_threads(1)
        print(step(torch.randn(8, 4), w1=torch.randn(4, 16), w2=torch.randn(16, 2))["y"].tolist())
    """
    assert fresh(on_cpu(two_layers().code), lines) == f"{expected.tolist()}\n"


def test_trees_numbers_and_parameters_travel():
    graph = asc.Graph()
    pieces, rate, weight = graph.inputs("pieces", "rate", "weight")
    with graph.on("cuda:0"):
        graph.output(y=graph.add(gradient_step, pieces, rate, weight))
    schedule = asc.schedule(graph, ONE_GPU, outputs="cpu")
    inputs = {
        "pieces": ({"a": torch.ones(2)}, [torch.ones(2)]),
        "rate": 0.5,
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    assert difference(graph.run_serial(**inputs), run(schedule, inputs)) is None
    assert "host_streams = [cuda0_copy_in, cuda0_copy_out]  #" in schedule.code


def gradient_step(pieces, rate, weight):
    with torch.enable_grad():
        loss = ((weight * pieces[0]["a"] + pieces[1][0]) ** 2).sum()
        return weight.detach() - rate * torch.autograd.grad(loss, weight)[0]


def test_streams_are_joined_when_a_task_raises():
    def broken(x):
        raise ValueError("broken")

    graph = asc.Graph()
    graph.output(y=graph.add(broken, graph.input("x"), on="cuda:0"))
    module = loaded(on_cpu(asc.schedule(graph, ONE_GPU).code))
    log = []
    module["Idle"].wait_stream = lambda *_: log.append("wait")
    module["Idle"].synchronize = lambda *_: log.append("synchronize")
    with pytest.raises(ValueError, match="broken"):
        module["step"](torch.ones(1), broken_fn=broken)
    assert log == ["wait"] * 4 + ["synchronize"]


def test_logical_devices_of_one_gpu_meet_by_waits():
    devices = [asc.Device("cpu"), *(asc.Device(f"cuda:{i}", physical="cuda:0") for i in range(2))]
    graph = two_layers().graph
    code = asc.schedule(graph, asc.Machine(devices, TWO_GPUS.links)).code
    assert 'cuda1 = torch.device("cuda:0")\n' in code
    assert (
        """
    with cuda0_copy_out, cuda1_copy_in:
        cuda0_copy_out.wait_event(e1)
        cuda1_copy_in.wait_stream(cuda0_copy_out)
        relu_cuda1 = to(relu, cuda1)
        cuda0_copy_out.wait_stream(cuda1_copy_in)
"""
        in code
    )


# ---- refusals


def test_a_graph_without_functions_is_refused():
    networkx = pytest.importorskip("networkx")
    schedule = asc.schedule(asc.Graph.from_networkx(networkx.DiGraph([("a", "b")])), TWO_GPUS)
    with pytest.raises(
        asc.ScheduleError, match="task 'a' has no function: it can be planned, not written as code"
    ):
        _ = schedule.code


def test_a_machine_without_contention_is_refused():
    schedule = two_layers()
    machine = asc.Machine.emulated(gpus=2, contention=False)
    with pytest.raises(asc.MachineError, match="a machine without contention is for planning"):
        generate(schedule.program, schedule.graph, machine)


def test_a_program_that_could_race_is_refused():
    schedule = two_layers()
    less = Program(
        tuple(i for i in schedule.program if not isinstance(i, Wait)),
        schedule.program.inputs,
        schedule.program.outputs,
    )
    with pytest.raises(asc.ProgramError):
        _ = dataclasses.replace(schedule, program=less).code


# ---- style


@pytest.mark.parametrize("build", [two_layers, lambda: of(torch.relu)])
def test_the_code_is_as_clean_as_ours(build):
    pytest.importorskip("ruff")
    for command in (["check"], ["format", "--check"]):
        options = "--config", ROOT / "ruff.toml", "--stdin-filename", "step.py", "-"
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options],
            input=build().code, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


TWO_LAYERS = r'''"""two layers: 3 tasks on cuda:0, cuda:1, 60 us predicted. Written by autosched.

A tensor is deleted where the stream that made it is behind all that used it: its memory is free again there.
"""

import copy
import functools
import threading

import torch

# The devices. To run this without accelerators, make each of them "cpu": streams do nothing then.
cuda0 = torch.device("cuda:0")
cuda1 = torch.device("cuda:1")


Stream, Event, current_stream = torch.Stream, torch.Event, torch.accelerator.current_stream
if all(device.type == "cpu" for device in (cuda0, cuda1)):
    Stream = Event = current_stream = Idle

cuda0_copy_in = Stream(cuda0)
cuda0_compute = Stream(cuda0)
cuda0_copy_out = Stream(cuda0)
cuda1_copy_in = Stream(cuda1)
cuda1_compute = Stream(cuda1)
e0 = Event(cuda0)
e1 = Event(cuda0)
e2 = Event(cuda0)
e3 = Event(cuda1)
streams = [cuda0_copy_in, cuda0_compute, cuda0_copy_out, cuda1_copy_in, cuda1_compute]
host_streams = [cuda0_copy_in, cuda1_copy_in]  # copy from or to host memory


@torch.no_grad()
@ordered_with_caller
def step(x, w1, w2):
    """Run once; return the outputs by name."""
    # stream cuda:0/copy-in
    with cuda0_copy_in:
        x_cuda0 = to(x, cuda0)
        w1_cuda0 = to(w1, cuda0)
        e0.record(cuda0_copy_in)
    # stream cuda:1/copy-in
    with cuda1_copy_in:
        w2_cuda1 = to(w2, cuda1)
    # stream cuda:0/compute
    with cuda0_compute:
        cuda0_compute.wait_event(e0)
        matmul = x_cuda0 @ w1_cuda0
        relu = torch.relu(matmul)
        del matmul
        e1.record(cuda0_compute)
    # stream cuda:0/copy-out and cuda:1/copy-in
    with cuda0_copy_out, cuda1_copy_in:
        cuda0_copy_out.wait_event(e1)
        relu_cuda1 = to(relu, cuda1)
        e2.record(cuda0_copy_out)
    # stream cuda:1/compute
    with cuda1_compute:
        cuda1_compute.wait_event(e2)
        matmul_1 = relu_cuda1 @ w2_cuda1
    # stream cuda:0/copy-in
    cuda0_copy_in.wait_event(e1)
    del x_cuda0, w1_cuda0
    # stream cuda:1/compute
    e3.record(cuda1_compute)
    # stream cuda:1/copy-in
    cuda1_copy_in.wait_event(e3)
    del w2_cuda1, relu_cuda1
    # stream cuda:0/compute
    cuda0_compute.wait_event(e2)
    del relu
    return {"y": matmul_1}
'''


def test_the_code_of_several_runs_in_flight_executes_one_after_another():
    graph = asc.Graph("update")
    w, x = graph.inputs("w", "x")
    with graph.on("cuda:0"):
        graph.add(torch.Tensor.add_, w, x, writes=[w], name="add")
        graph.output(y=w * 2)
    schedule = asc.schedule(graph, ONE_GPU, in_flight=3)
    assert schedule.program.in_flight == 3
    assert schedule.code == asc.schedule(graph, ONE_GPU).code
    w, step = torch.zeros(2), loaded(on_cpu(schedule.code))["step"]
    assert [step(w, torch.ones(2))["y"].tolist() for _ in range(3)] == [[2, 2], [4, 4], [6, 6]]
