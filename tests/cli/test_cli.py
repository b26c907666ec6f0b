"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import autosched
from autosched import cli, demo
from autosched.cli import command_parser, commands
from autosched.cli.output import UserCodeError, deliver, exit_code, tracker
from autosched.errors import UsageError
from autosched.scheduling import planning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sing"], "invalid choice: 'sing'"),
        (["show", "f.py:f", "--gpus", "1.5"], "argument --gpus: must be a whole number, got '1.5'"),
        (["show", "f.py:f", "--gpus", "1000000"], "argument --gpus: must be from 0 to 256, got 1000000"),
        (["show", "f.py:f", "--slower", "much"], "argument --slower: must be a number above 0, got much"),
        (
            ["show", "f.py:f", "--policy", "best"],
            "argument --policy: invalid choice: 'best' (choose from 'auto', 'search'",
        ),
        (["show", "f.py:f", "--hosts", "0"], "argument --hosts: must be from 1 to 4096, got 0"),
        (["demo", "--epochs", "0"], "argument --epochs: must be 1 or more, got 0"),
    ],
)  # fmt: skip
def test_bad_usage_is_told_and_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_demo_trains_compares_measures_and_draws(tmp_path, capsys):
    """One epoch is not enough for an accuracy of 0.95, which the exit code asks for; all else is as in the full run."""
    code = cli.main(["demo", "--epochs", "1", "--folder", str(tmp_path / "new")])
    said, complaints = capsys.readouterr()
    assert complaints == ""
    starts = [
        "machine: ",
        "    cpu: ",
        "<Schedule of 'two-layer MLP': ",
        "its program begins:",
        "epoch  1: loss ",
        "one step",
    ]
    starts += [
        f"    {label} "
        for label in (
            "predicted makespan",
            "measured makespan",
            "serial",
            "lower bound",
            "copies hidden",
        )
    ]
    lines = said.splitlines()
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    assert "    cuda:0/copy-in " in said
    assert "equal to serial: bit for bit (56,832 weights after 10 steps)" in lines
    accuracy = float(next(line for line in lines if line.startswith("epoch  1")).split()[-1])
    assert code == (0 if accuracy > 0.95 else 1)
    assert accuracy > 0.5
    for name in ("mlp.svg", "mlp_graph.svg"):
        root = ElementTree.fromstring((tmp_path / "new" / name).read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "h.0" in "".join(root.itertext())
    assert "<title>One training step of a two-layer MLP" in (
        tmp_path / "new" / "mlp.html"
    ).read_text(encoding="utf-8")

    ignored = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").splitlines()
    for path in (tmp_path / "new").iterdir():
        assert f"/{path.name}" in ignored  # `make demo` writes them into the clone


def test_tasks_of_the_demo_come_from_its_own_lines():
    assert {Path(task.origin.where[0]).name for task in demo.mlp_step().tasks} == {"demo.py"}


def test_a_demo_that_differs_from_the_serial_run_names_the_weights_and_fails(
    tmp_path, capsys, monkeypatch
):
    initial_weights, calls = demo.initial_weights, []

    def a_little_off_the_second_time(*arguments):
        weights = initial_weights(*arguments)
        weights["w2"] += 1e-6 * len(calls)
        calls.append(arguments)
        return weights

    monkeypatch.setattr(demo, "initial_weights", a_little_off_the_second_time)
    monkeypatch.setattr(demo, "_batches", lambda *_: [])
    monkeypatch.setattr(demo, "_report", lambda *_: None)
    assert demo.main(folder=tmp_path) == 1
    assert "\nNOT equal to serial after 120 steps: w2\n" in capsys.readouterr().out


def test_control_c_exits_with_130(monkeypatch, tmp_path):
    def interrupt(epochs, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupt)
    assert cli.main(["demo", "--folder", str(tmp_path)]) == 130


# ---- what a command works on

BUILDER = """
import autosched as asc
import torch

def graph():
    made = asc.Graph("two layers")
    x, w = made.inputs("x", "w")
    h = made.add(torch.matmul, x, w, name="h", on="cuda:0", seconds=1e-3, nbytes=4096)
    made.output(loss=made.add(torch.sum, h, name="loss", on="cuda:1", seconds=1e-3))
    return made

def example():
    return graph(), {"x": torch.ones(4, 4), "w": torch.ones(4, 4)}

def with_machine():
    return *example(), asc.Machine.emulated(gpus=3, link="pcie5")

def schedule():
    return asc.schedule(graph(), asc.Machine.emulated(gpus=2))

def unequal():
    made, calls = asc.Graph(), []
    count = lambda x: x + (calls.append(1) or len(calls))
    made.output(count=made.add(count, made.input("x"), name="count"))
    return made, {"x": torch.zeros(1)}

def broken():
    return 1 / 0

def breaks():
    made = asc.Graph()
    made.output(y=made.add(fails, made.input("x"), name="fails"))
    return made, {"x": torch.zeros(1)}

def fails(x):
    raise ValueError("too tired")

def needs(argument):
    return argument

answer = 42
"""


@pytest.fixture
def builder(tmp_path):
    """Return a file with functions that build graphs."""
    path = tmp_path / "builder.py"
    path.write_text(BUILDER)
    return str(path)


@pytest.fixture
def plan(tmp_path, builder):
    """Return a saved schedule of the graph in ``builder``, as arguments of commands."""
    path = tmp_path / "plan.json"
    runpy.run_path(builder)["schedule"]().save(path)
    return str(path), "--graph", f"{builder}:graph"


def run(capsys, *arguments):
    """Run a command; return its exit code, what it printed and what it complained of."""
    capsys.readouterr()
    parts = (part if isinstance(part, tuple) else (part,) for part in arguments)
    code = cli.main([str(argument) for argument in itertools.chain.from_iterable(parts)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", ["graph", "example", "with_machine", "schedule"])
def test_a_thing_may_be_each_of_what_a_function_returns(name, builder, capsys):
    code, said, complaints = run(capsys, "show", f"{builder}:{name}", "--json")
    assert (code, complaints) == (0, "")
    found = json.loads(said)
    assert found["graph"] == "two layers"
    assert 2e-3 < found["makespan"] < 2.1e-3
    assert list(found["devices"]) == [
        "cpu",
        "cuda:0",
        "cuda:1",
        *["cuda:2"] * (name == "with_machine"),
    ]


SAVED = "{plan} --graph {builder}:graph"
THING = "a THING is package.module:function, file.py:function"
REFUSED = [
    ("show none.json", f"none.json: no such file, and no function; {THING}"),
    ("show no_such_package:graph", "there is no module 'no_such_package', neither installed nor in this folder"),
    ("show {builder}", "name a function in it, "),
    ("show {builder}:grahp", "has no 'grahp'; its functions are 'graph', 'example', 'with_machine', 'schedule', "),
    ("show {builder}:needs", "is called without arguments, and it is needs(argument)"),
    ("show {builder}:answer", "a Graph, (Graph, inputs), (Graph, inputs, Machine) or a Schedule, got 'int'"),
    ("show {file} --graph {builder}:graph", "{file}: it misses key 'format'"),
    (f"show {SAVED} --gpus 1", "the machine has no device 'cuda:1'; it has 'cpu', 'cuda:0'"),
    (f"show {SAVED} --machine {{file}}", "{file}: not the JSON of a machine"),
    (f"show {SAVED} --machine {{file}} --gpus 2", "--gpus or --link and --machine name different machines; give one"),
    (f"show {SAVED} --local --gpus 2", "this machine has no accelerator"),
    (f"show {SAVED} --policy heft --seconds 1", "seconds= is for the policies 'auto', 'search', 'exact'; 'heft' takes"),
    (f"show {SAVED} --machine nowhere.json", "autosched: nowhere.json: No such file or directory"),
    (f"show {SAVED} -o picture.bmp", "picture.bmp: no format has this suffix; known are "),
    (f"show {SAVED} --what graph --format code", "--what graph cannot be shown as code; it can as text, svg, png, pdf"),
    ("run {builder}:breaks --save profile.bmp", "profile.bmp: a profile is written as .json, .html, .svg\n"),
    ("show {builder}:graph --hosts 2 --local", "--hosts or --network and --local name different machines"),
    ("run {plan}", "{plan}: a saved schedule holds no functions; give the function that"),
    ("run {builder}:graph", "{builder}:graph gives no inputs; let its function return (graph, {{name: tensor}})"),
    ("run {builder}:example --graph x:y", "--graph goes with a saved schedule"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_what_cannot_be_is_told_in_a_line_before_anything_runs(
    command, message, plan, builder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    file = tmp_path / "file.json"
    file.write_text("{}")
    names = {"plan": plan[0], "builder": builder, "file": file}
    code, said, complaints = run(capsys, *command.format(**names).split())
    assert (code, said) == (2, "")
    assert complaints.startswith("autosched: ")
    assert message.format(**names) in complaints
    assert complaints.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["show", "{}:broken"], "ZeroDivisionError: division by zero"),
        (["run", "{}:breaks"], "ValueError: too tired"),
    ],
)
def test_an_error_of_the_users_own_function_is_shown_with_their_lines_alone(
    arguments, last, builder, capsys
):
    code, _, complaints = run(capsys, *(argument.format(builder) for argument in arguments))
    assert code == 2
    assert complaints.startswith("autosched: ")
    assert last in complaints.splitlines()
    files = [line for line in complaints.splitlines() if line.startswith("  File ")]
    assert len(files) == 1
    assert builder in files[0]


def test_a_users_file_beside_the_package_is_shown_too(capsys):
    """As in a clone of the repository, where its name may begin as the package's does."""
    file = f"{Path(autosched.__file__).parent}_models.py"
    users = {}
    exec(compile("def fails():\n    return 1 / 0\n", file, "exec"), users)

    def command():
        try:
            users["fails"]()
        except ZeroDivisionError as error:
            raise UserCodeError("it failed") from error

    assert exit_code(command) == 2
    assert f'File "{file}", line 2' in capsys.readouterr().err


# ---- machine, policy and costs


def test_options_plan_a_saved_schedule_anew(plan, capsys):
    as_saved = json.loads(run(capsys, "show", plan, "--json")[1])
    slower = json.loads(run(capsys, "show", plan, "--json", "--slower", "10")[1])
    assert slower["makespan"] > as_saved["makespan"]
    more = json.loads(run(capsys, "show", plan, "--json", "--gpus", "3", "--link", "pcie5")[1])
    assert list(more["devices"]) == ["cpu", "cuda:0", "cuda:1", "cuda:2"]


def test_a_machine_and_costs_come_from_files(plan, tmp_path, capsys):
    machine, costs = tmp_path / "machine.json", tmp_path / "costs.json"
    machine.write_text(autosched.Machine.emulated(gpus=4).to_json())
    costs.write_text('{"seconds": {"h": 2.0}}')
    found = json.loads(
        run(capsys, "show", plan, "--json", "--machine", machine, "--costs", costs)[1]
    )
    assert len(found["devices"]) == 5
    assert 2.0 < found["makespan"] < 2.1


def test_a_saved_schedule_is_planned_anew_if_it_is_to_be_looked_for_longer(
    plan, monkeypatch, capsys
):
    told, saved = [], autosched.schedule(demo.mlp_step(), autosched.Machine.emulated(gpus=2))
    monkeypatch.setattr(commands, "schedule", lambda *_, **given: told.append(given) or saved)
    run(capsys, "show", plan, "--what", "summary", "--seed", "3")
    assert not told
    run(capsys, "show", plan, "--what", "summary", "--seconds", "2.5", "--seed", "3")
    assert (told[0]["policy"], told[0]["seconds"], told[0]["seed"]) == ("auto", 2.5, 3)


def test_who_knows_no_costs_is_told_so(capsys):
    code, _, complaints = run(capsys, "show", "autosched.demo:mlp_step", "--what", "summary")
    assert code == 0
    assert complaints.startswith("autosched: note: nothing tells what tasks cost")
    assert run(capsys, "show", "autosched.demo:mlp_example", "--what", "summary")[2] == ""


@pytest.mark.parametrize(("variable", "coloured"), [("ANY", True), ("NO_COLOR", False)])
def test_a_chart_has_colours_on_a_terminal_unless_they_are_not_wanted(
    variable, coloured, plan, capsys, monkeypatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, "1")
    assert "\x1b[" not in run(capsys, "show", plan)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ("\x1b[" in run(capsys, "show", plan)[1]) == coloured


# ---- show


def test_a_schedule_is_shown_as_text(plan, capsys):
    code, said, complaints = run(capsys, "show", plan)
    assert (code, complaints) == (0, "")
    for line in ("cuda:0/compute   run h", "output loss on cuda:1"):
        assert line in said.splitlines()
    assert "█" in said
    assert "  lower bound " in said


@pytest.mark.parametrize("what", ["gantt", "graph", "memory"])
def test_a_schedule_is_shown_as_svg_in_a_file_or_on_stdout(what, plan, tmp_path, capsys):
    path = tmp_path / "picture.svg"
    code, said, complaints = run(capsys, "show", plan, "--what", what, "-o", path)
    assert (code, said, complaints) == (0, "", f"wrote {path}\n")
    assert (
        run(capsys, "show", plan, "--what", what, "--format", "svg")[1].strip()
        == path.read_text().strip()
    )
    assert "two layers" in "".join(ElementTree.fromstring(path.read_text()).itertext())


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("graph.dot", 'digraph "two layers"'),
        ("trace.json", '{"displayTimeUnit"'),
        ("page.html", "<!doctype html>"),
    ],
)
def test_the_name_of_a_file_says_what_is_written_to_it(name, begin, plan, tmp_path, capsys):
    path = tmp_path / name
    assert run(capsys, "show", plan, "-o", path) == (0, "", f"wrote {path}\n")
    assert begin in path.read_text()[:300]
    assert "two layers" in path.read_text()


def test_pictures_are_written_as_png(plan, tmp_path, capsys):
    pytest.importorskip("resvg_py", reason="extra [viz]")
    path = tmp_path / "plan.png"
    assert run(capsys, "show", plan, "-o", path) == (0, "", f"wrote {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", [".html", ".json", ".svg"])
def test_a_profile_is_written_beside_the_prediction(suffix, builder, tmp_path, capsys):
    path = tmp_path / f"profile{suffix}"
    code, _, complaints = run(capsys, "run", f"{builder}:example", "--repeat", "1", "--save", path)
    assert (code, complaints) == (0, f"wrote {path}\n")
    assert all(word in path.read_text() for word in ("predicted", "measured"))


def test_bytes_go_to_no_terminal(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(UsageError, match="stdout is a terminal; give -o FILE"):
        deliver(b"\x89PNG", None)
    deliver(b"\x89PNG", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes() == b"\x89PNG"


# ---- proofs


def test_a_race_is_named_with_its_line_and_exits_with_1(plan, capsys):
    document = json.loads(Path(plan[0]).read_text())
    wait = next(line for line in document["program"] if "wait" in line and "cuda:1/compute" in line)
    document["program"].remove(wait)
    Path(plan[0]).write_text(json.dumps(document))
    for command in ("show", "run"):
        code, said, complaints = run(capsys, command, plan)
        assert (code, said) == (1, "")
        assert complaints.startswith(f"autosched: {plan[0]}: ")
        assert "run loss" in complaints


# ---- explain


def test_a_schedule_and_a_task_are_explained(plan, builder, capsys):
    code, said, complaints = run(capsys, "explain", plan)
    assert (code, complaints) == (0, "")
    assert said.startswith("two layers: ")
    assert run(capsys, "explain", plan, "--task", "loss")[1].startswith("loss on cuda:1")
    assert (
        json.loads(run(capsys, "explain", plan, "--task", "loss", "--json")[1])["device"]
        == "cuda:1"
    )
    assert (
        "measured" in run(capsys, "explain", f"{builder}:example", "--profile", "--repeat", "1")[1]
    )


# ---- run and measure


@pytest.mark.parametrize("thing", ["{builder}:example", "{plan} --graph {builder}:example"])
def test_a_run_is_held_to_the_serial_run(thing, plan, builder, capsys):
    given = thing.format(plan=plan[0], builder=builder).split()
    code, said, complaints = run(capsys, "run", *given)
    assert (code, complaints) == (0, "")
    assert said == (
        "ran two layers on cpu, cuda:0, cuda:1 (emulated machine): equal to the serial run, bit for bit\n"
    )


def test_a_profile_stands_beside_the_prediction(builder, capsys):
    code, said, _ = run(capsys, "run", f"{builder}:example", "--profile", "--repeat", "2")
    assert code == 0
    labels = [line.split("  ")[0] for line in said.splitlines()[2:]]
    assert labels == ["", "makespan", "copies hidden", "cpu busy", "cuda:0 busy", "cuda:1 busy"]
    found = json.loads(
        run(capsys, "run", f"{builder}:example", "--profile", "--repeat", "1", "--json")[1]
    )
    assert found["measured"]["makespan"] >= 2e-3


def test_a_run_that_differs_from_the_serial_run_says_how_and_exits_with_1(builder, capsys):
    code, said, complaints = run(capsys, "run", f"{builder}:unequal")
    assert code == 1
    assert "NOT equal to the serial run" in said
    assert re.match(
        r"autosched: not equal to the serial run: .*'count'.* differs in 1 of 1 numbers", complaints
    )


def test_what_is_measured_is_what_other_commands_take(builder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    costs, machine = tmp_path / "costs.json", tmp_path / "machine.json"
    options = ["--repeat", "1", "-o", costs, "--links", machine]
    assert run(capsys, "measure", f"{builder}:example", *options)[0] == 0
    assert autosched.Machine.from_json(machine.read_text()) == autosched.Machine.local()
    assert set(json.loads(costs.read_text())["seconds"]) == {"h", "loss"}
    assert run(capsys, "show", f"{builder}:graph", "--what", "summary", "--costs", costs)[0] == 0


# ---- compare and devices


def test_machines_and_policies_are_compared(plan, tmp_path, capsys):
    code, said, complaints = run(
        capsys, "compare", plan, "--gpus", "1", "2", "3", "--policies", "heft", "auto"
    )
    assert (code, complaints) == (0, "")
    assert len(said.splitlines()) == 7
    assert said.splitlines()[-1].startswith(
        "1 GPU, pcie4: refused (heft, auto): the machine has no device 'cuda:1'"
    )
    found = json.loads(
        run(capsys, "compare", plan, "--gpus", "2", "--links", "pcie4", "nvlink4", "--json")[1]
    )
    assert [row["machine"] for row in found["rows"][::4]] == ["2 GPUs, pcie4", "2 GPUs, nvlink4"]
    assert run(capsys, "compare", plan, "--gpus", "2", "4", "-o", tmp_path / "lines.svg")[0] == 0
    assert "two layers: predicted" in "".join(
        ElementTree.fromstring((tmp_path / "lines.svg").read_text()).itertext()
    )


def test_a_comparison_in_which_nothing_works_exits_with_2(plan, capsys):
    code, said, complaints = run(capsys, "compare", plan, "--gpus", "1")
    assert code == 2
    assert "refused" in said
    assert complaints == "autosched: no machine can run this; the reasons are printed above\n"


AVERAGED = "autosched.demo:averaged_example"


@pytest.mark.parametrize("hosts", [("--hosts", "2"), ("--network", "infiniband400")])
def test_a_cluster_is_shown_by_host_and_a_network_alone_asks_for_two(hosts, capsys):
    code, said, _ = run(capsys, "show", AVERAGED, *hosts, "--gpus", "0", "--policy", "round_robin")
    lines = said.splitlines()
    assert code == 0
    assert [line for line in lines if line in ("host 0", "host 1")] == ["host 0", "host 1"]
    assert "rank 1 has cpu:1" in lines


def test_numbers_of_hosts_are_compared(capsys):
    command = f"compare {AVERAGED} --hosts 1 2 --gpus 1 --policies heft"
    code, said, _ = run(capsys, *command.split())
    assert code == 0
    assert "1 host with 1 GPU, pcie4 and ethernet100" in said
    assert "2 hosts with 2 CPUs and 2 GPUs, ethernet100" in said


def test_devices_are_shown_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    path = tmp_path / "machine.json"
    code, said, complaints = run(capsys, "devices", "--write", path)
    assert (code, complaints) == (0, f"wrote {path}\n")
    assert said.startswith(f"torch {torch.__version__}: ")
    assert "  cpu: 50 GFLOP/s" in said
    assert autosched.Machine.from_json(path.read_text()) == autosched.Machine.local()
    assert json.loads(run(capsys, "devices", "--json")[1])["machine"]["devices"][0]["name"] == "cpu"


# ---- manners


def test_every_command_has_an_example_that_parses(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {
        "demo",
        "devices",
        "show",
        "run",
        "compare",
        "measure",
        "explain",
    } <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        for example in re.findall(r"example: autosched (.*)$", said):
            assert (
                command_parser().parse_args(example.partition(" && ")[0].split()).command == command
            )


def test_bars_are_for_terminals_alone(monkeypatch, capsys):
    assert tracker("working") is iter
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(tracker("working")([1, 2])) == [1, 2]
    assert "working: 2 of 2" in capsys.readouterr().err


UNEVEN = """
import autosched as asc

def uneven():  # lists need 7 s on two devices, and 6 s are possible
    made = asc.Graph("uneven")
    for i, seconds in enumerate((3, 3, 2, 2, 2)):
        made.add(int, name=f"task{i}", seconds=seconds)
    return made, {}, asc.Machine.emulated(gpus=1)
"""


def test_control_c_ends_a_search_with_the_best_so_far(tmp_path, monkeypatch, capsys):
    file = tmp_path / "uneven.py"
    file.write_text(UNEVEN)

    @contextmanager
    def impatient(what):
        def interrupt(part, makespan):
            if part > 0:
                raise KeyboardInterrupt

        yield interrupt

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(planning, "progress_bar", impatient)
    code, said, complaints = run(
        capsys,
        "show",
        f"{file}:uneven",
        "--what",
        "summary",
        "--policy",
        "search",
        "--seconds",
        "60",
    )
    assert (code, complaints) == (0, "")
    assert "makespan" in said


LIGHT = """
import sys
sys.modules["torch"] = None  # from here on, importing torch raises
from autosched.cli import main
sys.exit(main(["show", sys.argv[1]]) or main(["compare", sys.argv[1], "--gpus", "2"]))
"""


@pytest.fixture
def light(tmp_path):
    """Return a thing that needs no torch."""
    file = tmp_path / "light.py"
    file.write_text(
        "import autosched\n"
        "graph = autosched.Graph()\n"
        "graph.output(y=graph.add(abs, graph.input('x'), seconds=1.0))\n"
        "def light(): return graph\n"
    )
    return f"{file}:light"


def test_a_graph_is_shown_and_compared_without_torch(light):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, light], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_that_is_closed_is_no_error(light):
    command = f"{shlex.join([sys.executable, '-m', 'autosched', 'show', light])} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) in (
        (0, ""),
        (141, ""),
    )  # all may have been written before
