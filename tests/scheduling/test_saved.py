"""Saved schedules: they read back, they say what is wrong with a file, and no file does harm."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import autosched as asc
from autosched.costs.costs import Work
from autosched.lowering import lower
from autosched.policies import POLICIES
from autosched.program.program import Wait
from autosched.runtime.backends.virtual import Virtual
from autosched.scheduling.saved import Saved, describe, from_text, to_text
from tests.strategies import DEVICES, graphs, inputs_for, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
TWO_GPUS = asc.Machine.emulated(gpus=2)


def layers() -> asc.Graph:
    """Return two products, on two devices."""
    graph = asc.Graph("layers")
    x, w = graph.inputs("x", "w")
    with graph.on("cuda:0"):
        h = graph.add(torch.matmul, x, w, name="h")
    with graph.on("cuda:1"):
        graph.output(y=graph.add(torch.matmul, h, w, name="out"))
    return graph


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


@pytest.fixture
def saved(path: Path) -> Path:
    """Return where a schedule of ``layers()`` is saved."""
    asc.schedule(layers(), TWO_GPUS, costs=COSTS.override({"h": 1.0})).save(path)
    return path


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


# ---- what is saved comes back


@given(
    graph=graphs(), machine=machines(), policy=st.sampled_from(["auto", *POLICIES]), data=st.data()
)
def test_what_is_saved_comes_back(
    graph: asc.Graph, machine: asc.Machine, policy: str, data: st.DataObject
) -> None:
    wanted = {label: data.draw(st.sampled_from(DEVICES)) for label in graph.outputs}
    homes = {"x": data.draw(st.sampled_from(DEVICES))}
    backend = data.draw(st.sampled_from(["host", "virtual"]))
    options: dict[str, Any] = {
        "policy": policy,
        "costs": COSTS,
        "outputs": wanted,
        "backend": backend,
    }
    try:
        made = asc.schedule(graph, machine, inputs=homes, **options)
    except asc.ScheduleError:  # what shares memory with x must be where x is
        made = asc.schedule(graph, machine, **options)
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/a")
        loaded = asc.load(f"{folder}/a", graph)
        loaded.save(f"{folder}/b")
        assert Path(folder, "a").read_bytes() == Path(folder, "b").read_bytes()
        assert sorted(item.name for item in Path(folder).iterdir()) == ["a", "b"]
    for field in ("machine", "costs", "placement", "program", "backend", "check"):
        assert getattr(loaded, field) == getattr(made, field)
    assert loaded.simulate() == made.simulate()
    assert loaded.lower_bound == made.lower_bound
    with loaded:
        assert_equals_serial(loaded, graph)


def assert_equals_serial(schedule: asc.Schedule, graph: asc.Graph) -> None:
    torch.manual_seed(3)
    expected_inputs = inputs_for(graph)
    expected = graph.run_serial(**expected_inputs)
    torch.manual_seed(3)
    inputs = inputs_for(graph)
    outputs = schedule(**inputs)
    assert outputs.keys() == expected.keys()
    assert all(torch.equal(outputs[label], expected[label]) for label in expected)
    assert all(torch.equal(inputs[name], expected_inputs[name]) for name in inputs)


def test_copies_of_a_placement_are_saved(path: Path) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    halves = [graph.add(torch.neg, x, name=name) for name in "ab"]
    graph.output(y=graph.add(torch.add, *halves, name="c"))
    costs = asc.Costs.table(dict.fromkeys("abc", 1.0))
    made = asc.schedule(graph, asc.Machine.emulated(gpus=2), policy="heft", costs=costs)
    made.save(path)
    assert made.placement.copies
    assert asc.load(path, graph).placement == made.placement


def test_a_file_is_made_for_reading(path: Path) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cpu"):
        x.mul_(2)
        graph.output(**{"twice-as-much": graph.add(abs, x, name="twice")})
    free = asc.Link("cpu", "cuda:0", math.inf)
    machine = asc.Machine(
        [asc.Device("cpu", 2), asc.Device("cuda:0", physical="cuda:3")], [free], imagined=True
    )
    costs = asc.Costs(work={"mul": Work(1, 2.5)}).override(
        {"twice": {"cpu": 1, "cuda:0": math.inf}}, {"x": 8}
    )
    asc.schedule(graph, machine, costs=costs, check=True).save(path)
    assert path.read_text() == FILE


FILE = """\
{
  "format": 3,
  "backend": "emulated",
  "check": true,
  "inputs": {
    "x": "cpu"
  },
  "outputs": {
    "twice-as-much": "cpu"
  },
  "placement": {
    "mul": "cpu",
    "twice": "cpu"
  },
  "program": [
    "cpu/compute  run mul",
    "cpu/compute  run twice"
  ],
  "machine": {
    "devices": [
      {
        "name": "cpu",
        "streams": 2,
        "flops_per_second": 10000000000000.0,
        "bytes_per_second": 1000000000000.0,
        "launch_seconds": 5e-06,
        "nbytes": "inf",
        "physical": null
      },
      {
        "name": "cuda:0",
        "streams": 1,
        "flops_per_second": 10000000000000.0,
        "bytes_per_second": 1000000000000.0,
        "launch_seconds": 5e-06,
        "nbytes": "inf",
        "physical": "cuda:3"
      }
    ],
    "links": [
      {
        "source": "cpu",
        "destination": "cuda:0",
        "bytes_per_second": "inf",
        "latency": 0.0
      }
    ],
    "contention": true,
    "imagined": true
  },
  "costs": {
    "seconds": {
      "twice": {
        "cpu": 1,
        "cuda:0": "inf"
      }
    },
    "nbytes": {
      "x": 8
    },
    "work": {
      "mul": {
        "flops": 1,
        "nbytes": 2.5,
        "launches": 1
      }
    },
    "default_seconds": 1e-05,
    "default_nbytes": 0.0
  },
  "graph": [
    "input x",
    "task mul  reads x  writes x",
    "task twice  reads x@1  makes twice  data mul",
    "output twice as twice-as-much"
  ],
  "devices": {
    "mul": "cpu",
    "twice": "cpu"
  },
  "streams": 1
}
"""


def test_the_machine_of_a_file_is_one_that_machine_reads(saved: Path) -> None:
    assert asc.Machine.from_json(json.dumps(json.loads(saved.read_text())["machine"])) == TWO_GPUS


def test_whatever_number_can_be_a_cost_is_saved(path: Path) -> None:
    graph = layers()
    seconds = {"h": {"cuda:0": np.float32(0.1), "cuda:1": np.int64(2)}, "out": Fraction(1, 3)}
    made = asc.schedule(
        graph, TWO_GPUS, costs=asc.Costs.table(seconds, {"out": Fraction(5, 2), "w": np.float64(7)})
    )
    made.save(path)
    loaded = asc.load(path, graph)
    assert loaded.costs.seconds == {"h": {"cuda:0": np.float32(0.1), "cuda:1": 2}, "out": 1 / 3}
    assert loaded.costs.nbytes == {"out": 2.5, "w": 7}
    assert loaded.simulate() == made.simulate()


def test_names_in_any_script_are_saved(path: Path) -> None:
    graph = asc.Graph()
    graph.output(**{"->\ud800\u200b": graph.add(abs, graph.input("größe"), name="\ud800,(")})
    made = asc.schedule(graph, TWO_GPUS)
    made.save(path)
    assert asc.load(path, graph).program == made.program


def test_a_schedule_comes_back_for_other_functions_of_the_same_names(saved: Path) -> None:
    graph = asc.Graph("other")
    x, w = graph.inputs("x", "w")
    h = graph.add(max, x, w, name="h", on="cuda:0", seconds=5.0)
    graph.output(y=graph.add(lambda a, b: a - b, h, w, name="out", on="cuda:1"))
    with dataclasses.replace(asc.load(saved, graph), backend="host") as loaded:
        assert loaded(x=1, w=2) == {"y": 0}


# ---- what cannot be saved


def test_a_backend_that_is_an_object_cannot_be_saved(path: Path) -> None:
    made = asc.schedule(layers(), TWO_GPUS, backend=Virtual())
    with pytest.raises(
        asc.ScheduleError, match=r"backend <.*Virtual.*> is an object and cannot be saved; only"
    ):
        made.save(path)
    assert not path.exists()


def test_costs_whose_keys_are_no_strings_cannot_be_saved(path: Path) -> None:
    costs = asc.Costs(seconds={"h": {-1: 1.0, "cuda:0": 1.0}})  # type: ignore[dict-item]
    with pytest.raises(asc.ScheduleError, match="has the key -1, and only strings"):
        asc.schedule(layers(), TWO_GPUS, costs=costs).save(path)


def test_a_program_changed_by_hand_is_proved_before_it_is_saved(path: Path) -> None:
    made = asc.schedule(layers(), TWO_GPUS)
    shorter = dataclasses.replace(made.program, instructions=made.program.instructions[1:])
    with pytest.raises(asc.ProgramError):
        dataclasses.replace(made, program=shorter).save(path)


def rewritten(made: asc.Schedule, edit: Callable[[Any], Any]) -> asc.Schedule:
    instructions = tuple(edit(instruction) for instruction in made.program)
    return dataclasses.replace(
        made, program=dataclasses.replace(made.program, instructions=instructions)
    )


def test_a_saved_loop_is_a_loop() -> None:
    graph = asc.Graph()
    graph.add(torch.Tensor.add_, graph.input("w"), 1, writes=[graph.value("w")], on="cuda:0")
    made = asc.schedule(graph, TWO_GPUS, costs=COSTS)
    loop = lower(asc.Problem(made.graph, made.machine), made.placement, in_flight=3)
    assert any(isinstance(i, Wait) and i.ago for i in loop)
    text = to_text(saved_of(made, loop))
    assert from_text(text).program == loop
    assert "in_flight" not in to_text(saved_of(made, made.program))
    with pytest.raises(
        asc.ScheduleError, match="in_flight must be a number of runs: 2 or more, got 1"
    ):
        from_text(text.replace('"in_flight": 3', '"in_flight": 1'))


def saved_of(made: asc.Schedule, program: asc.Program) -> Saved:
    graph = made.graph
    machine, costs, placement = made.machine, made.costs, made.placement
    return Saved(describe(graph), machine, costs, placement, program, "host", False, {})


def test_a_copy_that_its_text_does_not_show_in_full_cannot_be_saved(path: Path) -> None:
    def turned(instruction: Any) -> Any:
        also = getattr(instruction, "also", None)
        return (
            dataclasses.replace(instruction, stream=also, also=instruction.stream)
            if also
            else instruction
        )

    with pytest.raises(
        asc.ScheduleError, match=r"^the program has parts that its text form does not show, so"
    ):
        rewritten(asc.schedule(layers(), TWO_GPUS), turned).save(path)


def test_a_placement_that_is_not_the_programs_cannot_be_saved(path: Path) -> None:
    graph = asc.Graph()
    a = graph.add(abs, graph.input("x"), name="a")
    graph.output(b=graph.add(abs, a, name="b"))
    made = asc.schedule(graph, TWO_GPUS, policy="single")
    other = asc.Placement({"a": "cpu", "b": "cuda:0"}, ("a", "b"))
    message = "^the program runs b on cpu where the placement has b on cuda:0$"
    with pytest.raises(asc.ScheduleError, match=message):
        dataclasses.replace(made, placement=other).save(path)


# ---- files


def test_a_missing_file_is_missing(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        asc.load(path, layers())


def test_a_save_that_fails_leaves_what_was_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        asc.schedule(layers(), TWO_GPUS, policy="heft").save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_save_goes_through_a_symbolic_link_and_keeps_to_the_umask(
    saved: Path, tmp_path: Path
) -> None:
    link, plain = tmp_path / "link", tmp_path / "plain"
    link.symlink_to(saved)
    saved.write_bytes(b"")
    asc.schedule(layers(), TWO_GPUS).save(str(link))
    plain.touch()
    assert link.is_symlink()
    assert saved.stat().st_size > 1000
    assert saved.stat().st_mode == plain.stat().st_mode


# ---- what is refused


def changed(*names: str, edit: Callable[..., Any] = lambda *_: None) -> asc.Graph:
    """Return a graph with such inputs, x and w if not said, and what is added to them."""
    graph = asc.Graph("changed")
    edit(graph, *graph.inputs(*(names or ("x", "w"))))
    return graph


def first(graph: asc.Graph, *args: Any, **facts: Any) -> Any:
    """Add the first task of ``layers()``, or one like it."""
    return graph.add(abs, *args, **{"name": "h", "on": "cuda:0", **facts})


H = "task h  reads x w  makes h"
OTHERS: dict[str, tuple[asc.Graph, str, str]] = {
    "input": (changed("x", "v"), "input w", "input v"),
    "more": (changed("x", "w", "v"), H, "input v"),
    "fewer": (changed("x", "w"), H, "nothing more"),
    "name": (changed(edit=lambda g, x, w: first(g, x, w, name="g")), H, "task g  reads x w  makes g"),
    "reads": (changed(edit=lambda g, x, w: first(g, w, x)), H, "task h  reads w x  makes h"),
    "writes": (changed(edit=lambda g, x, w: first(g, x, w, writes=w)), H, "task h  reads x w  writes w  makes h"),
    "makes": (changed(edit=lambda g, x, w: first(g, x, w, outputs=2)), H, "task h  reads x w  makes h.0 h.1"),
    "sharing": (changed(edit=lambda g, x, w: first(g, x, w, aliases=x)), H, f"{H}  sharing x"),
    "after": (
        changed(edit=lambda g, x, w: first(g, x, w, name="out", on="cuda:1", after=first(g, x, w))),
        "task out  reads h w  makes out  data h", "task out  reads x w  makes out  order h"),
    "label": (
        changed(edit=lambda g, x, w: g.output(z=first(g, first(g, x, w), w, name="out", on="cuda:1"))),
        "output out as y", "output out as z"),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_another_graph_is_refused_with_the_first_difference(change: str, saved: Path) -> None:
    graph, there, here = OTHERS[change]
    with pytest.raises(asc.ScheduleError) as refusal:
        asc.load(saved, graph)
    assert str(refusal.value) == (
        f"{saved}: graph 'changed' is not the one that was saved\n    saved:  {there}\n    given:  {here}"
    )


def test_a_constant_is_no_input_and_a_view_is_no_copy() -> None:
    view, plain, constant = asc.Graph(), asc.Graph(), asc.Graph()
    view.input("x").T.add_(1)
    x = plain.input("x")
    plain.add(
        abs,
        plain.add(abs, x, name="T", aliases=x),
        name="add",
        writes=[plain.value("T")],
        outputs=(),
    )
    constant.constant(torch.ones(1), "x")
    assert describe(view) == (
        "input x",
        "task T  reads x  makes T  sharing x  view",
        "task add  reads T  writes T  data T",
    )
    assert describe(plain) == (
        "input x",
        "task T  reads x  makes T  sharing x",
        "task add  reads T  writes T  data T",
    )
    assert describe(constant) == ("constant x",)


def put(*place: Any, value: Any) -> Callable[[Any], None]:
    """Return the edit that puts a value at a place of a document; with ``...``, nothing is left there."""

    def edit(document: Any) -> None:
        for key in place[:-1]:
            document = document[key]
        document[place[-1]] = value
        if value is ...:
            del document[place[-1]]

    return edit


def drop(*place: Any) -> Callable[[Any], None]:
    return put(*place, value=...)


AMOUNT = 'must be a number, or "inf", got'
INSTRUCTION = (
    "must be an instruction, such as 'cpu/compute  run h', as print(schedule) shows them, got"
)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("format", value=4), "format must be 3, the version that this autosched reads, got 4"),
        (put("format", value=True), "format must be 3, the version that this autosched reads, got true"),
        (drop("format"), "it misses key 'format'; its keys are 'format', 'backend', 'check', 'inputs', 'outputs', "),
        (put("extra", value=1), "it has an unknown key 'extra'; its keys are 'format', 'backend', "),
        (put("backend", value="gpu"), 'emulated, virtual, accelerator, ranks, replay, got "gpu'),
        (put("backend", value=[]), "accelerator, ranks, replay, got a list"),
        (put("check", value=0), 'check must be true, false or "bytes", got 0'),
        (put("inputs", "x", value="c pu"), 'inputs["x"] must be the name of a device, such as \'cpu\' or \'cuda:0\','),
        (put("inputs", "x", value="cuda:7"), "the machine has no device 'cuda:7'; it has 'cpu', 'cuda:0', 'cuda:1'"),
        (put("inputs", "z", value="cpu"), "inputs= names 'z', which is no input; inputs are 'x', 'w'"),
        (drop("inputs", "x"), "the program's inputs are ['w'], the graph's ['w', 'x']"),
        (put("outputs", value=["y"]), "outputs must be an object, got a list"),
        (put("outputs", "y", value="cuda:7"), "the machine has no device 'cuda:7'; it has"),
        (put("outputs", "y", value="cpu"), "output 'y', 'out' on cpu, is not there at the end"),
        (put("placement", "h", value="cpu"), "the program runs h on cuda:0 where the placement has h on cpu"),
        (put("placement", "g", value="cpu"), "the program runs nothing on any device where the placement has g on cpu"),
        (put("program", value="run h"), 'program must be a list, got "run h"'),
        (put("program", 0, value="input x on cpu"), f'program[0] {INSTRUCTION} "input x on cpu"'),
        (put("program", 0, value=7), f"program[0] {INSTRUCTION} 7"),
        (put("program", 1, value=f"cpu/compute  wait e{'9' * 5000}"), f'program[1] {INSTRUCTION} "cpu/compute'),
        (put("program", 1, value="cpu/compute  wait e0\ncpu/compute  wait e0"), f"program[1] {INSTRUCTION}"),
        (drop("program", 0), "'x' on cuda:0 is read but not there; it is on cpu: a copy is missing"),
        (put("machine", value=None), "machine must be an object, got null"),
        (put("machine", "devices", 0, "streams", value=1.0), "machine.devices[0]: device 'cpu' has 1.0 streams; 1 to"),
        (put("machine", "links", 2, "latency", value="inf"), "machine.links[2]: latency of Link(source="),
        (put("machine", "links", value=[]), "no link joins cpu and cuda:0 (law: place)"),
        (put("costs", "seconds", "h", value=True), f'costs.seconds["h"] {AMOUNT} true'),
        (put("costs", "seconds", "h", value={"cuda:0": None}), f'costs.seconds["h"]["cuda:0"] {AMOUNT} null'),
        (put("costs", "seconds", "h", value="inf"), "cuda:0/compute cannot run h: costs and links make it take for"),
        (put("costs", "seconds", "g", value=1), "costs give seconds for 'g', which graph 'layers' does not have"),
        (put("costs", "default_nbytes", value=10**309), f'costs.default_nbytes {AMOUNT} 1000'),
        (put("costs", "nbytes", "h", value="inf"), "costs: nbytes of 'h' must be a number, 0 or more, and finite"),
        (put("costs", "work", "g", value={"flops": 1, "nbytes": 1, "launches": 1}), "costs give work for 'g'"),
        (put("costs", "work", "h", value={"flops": 1}), "costs.work[\"h\"] misses key 'nbytes'; its keys are 'flops'"),
        (put("graph", 0, value={}), "graph[0] must be a string, got an object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(
    edit: Callable[[Any], Any], message: str, saved: Path
) -> None:
    change(saved, edit)
    with pytest.raises(asc.ScheduleError) as refusal:
        asc.load(saved, layers())
    assert str(refusal.value).startswith(f"{saved}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"{", b"[" * 100_000, "not JSON: "),
        (b'"check"', b'"check": false, "check"', "it must be an object, got one with the key 'check' twice"),
        (b'"h": 1.0', b'"h": {"cpu": 1, "cpu": 2}', f'costs.seconds["h"] {AMOUNT} one with the key'),
        (b'"h": 1.0', b'"h": NaN', 'not JSON: NaN is none of its numbers; infinity is written as the string "inf"'),
        (b'"h": 1.0', b'"h": -Infinity', "not JSON: -Infinity is none of its numbers"),
        (b'"h": 1.0', b'"h": 1e999', f'costs.seconds["h"] {AMOUNT} Infinity'),
        (b'"h": 1.0', b'"h": 1' + b"0" * 5000, "not JSON: Exceeds the limit"),
        (b"\n}\n", b"\n", "not JSON: Expecting ',' delimiter: line "),
        (b'"h": 1.0', b'"h": ' + b"[" * 500 + b"]" * 500, f'costs.seconds["h"] {AMOUNT} a list'),
        (b'"check"', b'"ch\xffck"', "'utf-8' codec can't decode byte 0xff"),
        (b"{", b"\xef\xbb\xbf{", "not JSON: Unexpected UTF-8 BOM"),
        (b"{", b"\x00{", "not JSON: Expecting value"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(old: bytes, new: bytes, message: str, saved: Path) -> None:
    before = saved.read_bytes()
    assert old in before
    saved.write_bytes(before.replace(old, new, 1))
    with pytest.raises(asc.ScheduleError) as refusal:
        asc.load(saved, layers())
    assert str(refusal.value).startswith(f"{saved}: {message}")


def test_a_placement_that_schedule_would_not_take_is_refused(path: Path) -> None:
    """Nothing could race: the task reads a copy. But lowering relies on the order of placements, and so may others."""
    graph = asc.Graph()
    x = graph.input("x")
    graph.add(abs, x, name="read", on="cuda:0")
    graph.add(abs, x, name="write", on="cpu", writes=x, outputs=())
    asc.schedule(graph, asc.Machine.emulated(gpus=1), policy="heft").save(path)

    def swap(document: Any) -> None:
        lines, placed = document["program"], document["placement"]
        reads = next(i for i, line in enumerate(lines) if "run read" in line)
        writes = next(i for i, line in enumerate(lines) if "run write" in line)
        lines.insert(writes, lines.pop(reads))
        document["placement"] = {name: placed[name] for name in ("write", "read")}

    change(path, swap)
    with pytest.raises(
        asc.ScheduleError, match=r"orders 'write' before 'read', on which it depends \(anti\)"
    ):
        asc.load(path, graph)


# ---- no file does harm


def text_of(graph: asc.Graph, machine: asc.Machine, policy: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="virtual").save(
            f"{folder}/plan"
        )
        return Path(folder, "plan").read_text()


def assert_refused_or_right(data: bytes, graph: asc.Graph) -> None:
    """Load: what is not refused runs as the serial run does, in several interleavings, and can be saved again."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan")
        plan.write_bytes(data)
        try:
            loaded = asc.load(plan, graph)
        except asc.ScheduleError:
            event("refused")
            return
        event("loaded")
        loaded.save(plan)
        assert asc.load(plan, graph).program == loaded.program
    assert repr(loaded)
    for seed in range(3):
        with dataclasses.replace(loaded, backend=Virtual(random.Random(seed).choice)) as schedule:
            assert_equals_serial(schedule, graph)


AT_ONCE = 8  # files from one schedule


def edit_bytes(text: bytearray, data: st.DataObject) -> None:
    """Flip a bit, or delete or insert some bytes, or cut off the rest."""
    kind = data.draw(st.sampled_from(["flip", "delete", "insert", "truncate"]))
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    if kind == "flip" and text:
        text[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "insert":
        text[at:at] = data.draw(
            st.binary(min_size=1, max_size=4) | st.sampled_from([b"0", b" ", b"9", b"\n"])
        )
    else:
        del text[at : None if kind == "truncate" else at + data.draw(st.integers(1, 8))]


Place = tuple[Any, int | str]  # a list or an object, and where in it


def places(document: Any) -> list[Place]:
    """Return every place of a document."""
    found: list[Place] = []
    pairs = list(document.items() if isinstance(document, dict) else enumerate(document))
    for key, part in pairs:
        found.append((document, key))
        if isinstance(part, (dict, list)):
            found += places(part)
    return found


ODD = [None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, 10**30, math.nan, math.inf]
ODD += ["", "inf", "cpu", "cuda:1", "x", "\ud800", [], {}, [[]], {"": None}]


def edit_document(document: Any, data: st.DataObject) -> None:
    """Change one place: put something else there, or what stands elsewhere, or drop, rename, double or swap."""
    everywhere = places(document)
    (whole, key), (other, name) = [
        everywhere[data.draw(st.integers(0, len(everywhere) - 1))] for _ in range(2)
    ]
    kind = data.draw(st.sampled_from(["replace", "copy", "delete", "rename", "double", "swap"]))
    if kind == "replace":
        whole[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    elif kind == "copy":
        whole[key] = copy.deepcopy(other[name])
    elif kind == "delete":
        del whole[key]
    elif kind == "swap":
        whole[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(whole[key])
    elif isinstance(whole, list):
        whole.insert(data.draw(st.integers(0, len(whole))), copy.deepcopy(whole[key]))
    else:
        again = data.draw(st.sampled_from(["", "x", "cpu", *map(str, whole), *map(str, other)]))
        whole[again] = whole[key] if kind == "double" else whole.pop(key)


def edit_program(lines: list[str], data: st.DataObject) -> None:
    """Swap, move, drop or double lines, or let a stream, a device or an event have another's name, once or all over."""
    a, b = [data.draw(st.integers(0, len(lines) - 1)) for _ in range(2)]
    words = list(dict.fromkeys(word for line in lines for word in line.split()))
    kind = data.draw(
        st.sampled_from(["swap", "next", "move", "drop", "double", "rename", "rename all"])
    )
    if kind == "swap":
        lines[a], lines[b] = lines[b], lines[a]
    elif kind == "next" and a:
        lines[a - 1 : a + 1] = lines[a], lines[a - 1]
    elif kind == "move":
        lines.insert(b, lines.pop(a))
    elif kind == "drop":
        del lines[a]
    elif kind == "double":
        lines.insert(b, lines[a])
    else:
        old = data.draw(st.sampled_from(lines[a].split()))
        new = data.draw(
            st.sampled_from(
                [*words, "cpu/compute", "cuda:1/compute1", "cuda:0/copy-in", "e0", "new/one"]
            )
        )
        for i in [a] if kind == "rename" else range(len(lines)):
            lines[i] = " ".join(new if word == old else word for word in lines[i].split())


def with_other_bytes(text: str, data: st.DataObject) -> bytes:
    changed = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        edit_bytes(changed, data)
    return bytes(changed)


def with_another_document(text: str, data: st.DataObject) -> bytes:
    document = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        if document:
            edit_document(document, data)
    return json.dumps(document).encode()


def with_another_program(text: str, data: st.DataObject) -> bytes:
    document = json.loads(text)
    lines = document["program"]
    for _ in range(data.draw(st.integers(1, 3))):
        if lines:
            edit_program(lines, data)
    runs = [line.split() for line in lines if line.split()[1:2] == ["run"]]
    document["placement"] = {words[-1]: words[0].partition("/")[0] for words in runs}
    return json.dumps(document).encode()


@pytest.mark.parametrize("changed", [with_other_bytes, with_another_document, with_another_program])
@given(
    graph=graphs(most=6), machine=machines(), policy=st.sampled_from([*POLICIES]), data=st.data()
)
def test_no_file_does_harm(
    changed: Callable[[str, st.DataObject], bytes],
    graph: asc.Graph,
    machine: asc.Machine,
    policy: str,
    data: st.DataObject,
) -> None:
    text = text_of(graph, machine, policy)
    for _ in range(AT_ONCE):
        assert_refused_or_right(changed(text, data), graph)


def test_a_schedule_with_places_is_loaded_for_the_graph_without(path: Path) -> None:
    made = asc.schedule(negated(), asc.Machine.emulated(gpus=1), place={"a": "cuda:0"})
    made.save(path)
    assert asc.load(path, negated()).program == made.program


def negated(device: str | None = None) -> asc.Graph:
    graph = asc.Graph()
    graph.output(y=graph.add(torch.neg, graph.input("x"), name="a", on=device) + 1)
    return graph


def test_a_schedule_that_breaks_a_constraint_of_the_graph_is_not_loaded(path: Path) -> None:
    asc.schedule(negated("cuda:0"), asc.Machine.emulated(gpus=1)).save(path)
    with pytest.raises(asc.ScheduleError, match="'a' is placed on 'cuda:0' but must run on 'cpu'"):
        asc.load(path, negated("cpu"))
