"""Reading tensors from files: what is there, what is not, and what has changed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autosched as asc

STORED = {
    "layer.0.weight": torch.arange(6.0).reshape(2, 3),
    "layer.1.weight": torch.arange(4).to(torch.bfloat16),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 3, dtype=torch.float16),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(STORED, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_all_tensors_of_a_file_are_those_that_its_library_wrote(model: Path) -> None:
    graph = asc.Graph()
    values = graph.read(model)
    assert values.keys() == STORED.keys()
    graph.output(**values)
    found = graph.run_serial()
    for name, tensor in STORED.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert graph.value(name).nbytes == tensor.nbytes


def test_one_tensor_or_several_are_read_by_name(model: Path) -> None:
    graph = asc.Graph()
    one = graph.read(model, "step")
    two = graph.read(str(model), ["mask", "none"], prefix="again.")
    assert (one.name, [value.name for value in two.values()]) == (
        "step",
        ["again.mask", "again.none"],
    )
    assert "step(): reads int64[] in model.safetensors, on storage" in str(graph)


def test_a_file_may_be_read_twice_and_names_have_no_spaces(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"two words": torch.arange(4)}, path)
    graph = asc.Graph()
    values = [graph.read(path, "two words") for _ in range(2)]
    assert [value.name for value in values] == ["two_words", "two_words_1"]
    values[1].mul_(10)
    graph.output(*values)
    for _ in range(2):  # what a run writes is not in the file
        first, second = graph.run_serial().values()
        assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [0, 10, 20, 30])


def header(path: Path, **entries: Any) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    return path


@pytest.mark.parametrize(
    "item",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, item: Any) -> None:
    path = header(tmp_path / "x.safetensors", w=item)
    with pytest.raises(asc.StorageError, match="has a malformed header"):
        asc.Graph().read(path)


ODD = [
    None,
    True,
    -1,
    2.5,
    float("inf"),
    float("nan"),
    10**40,
    "8",
    [],
    {},
    [[]],
    [None, 8],
    [0, 8, 8],
]


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_whatever_a_header_says_is_read_or_refused(tmp_path: Path, key: str, odd: Any) -> None:
    right = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for item in (odd, [0, odd], [odd]):
        with pytest.raises(asc.StorageError, match="has a malformed header"):
            asc.Graph().read(header(tmp_path / "x.safetensors", w={**right, key: item}))


def test_a_header_too_deep_for_the_parser_is_refused(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(asc.StorageError, match="has a malformed header: RecursionError"):
        asc.Graph().read(tmp_path / "x.safetensors")


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(8), b"\xff" * 20])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(asc.StorageError, match="does not begin with a header of safetensors"):
        asc.Graph().read(tmp_path / "x.safetensors")


def test_what_a_file_does_not_have_is_told(model: Path, tmp_path: Path) -> None:
    graph = asc.Graph()
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = [
        (
            "has no tensor 'layer.0.wait'; did you mean 'layer.0.weight'",
            (model, "layer.0.wait"),
            {},
            asc.GraphError,
        ),
        ("has no tensor 'x'; it has 'step', 'layer", (model, ["x"]), {}, asc.GraphError),
        ("is not named *.safetensors, and only", (tmp_path / "raw",), {}, asc.GraphError),
        ("cannot be read: No such", (tmp_path / "no.safetensors",), {}, asc.StorageError),
        ("cannot be read: it is a folder", (folder,), {}, asc.StorageError),
        ("cannot be read: it is no regular file", (pipe,), {}, asc.StorageError),
        ("cannot be read: embedded null byte", ("a\0.safetensors",), {}, asc.StorageError),
        ("must be a string or a Path, got 3", (3,), {}, asc.GraphError),
        ("tensor= must be a name, or several in a list, got 3", (model, 3), {}, asc.GraphError),
        ("has no tensor [3]", (model, [[3]]), {}, asc.GraphError),
        ("on= of graph.read is a storage", (model,), {"on": 0}, asc.GraphError),
        ("on= of graph.read is a storage device", (model,), {"on": "cuda:0"}, asc.GraphError),
    ]
    for message, args, kwargs, kind in wrong:
        with pytest.raises(kind, match=re.escape(message)):
            graph.read(*args, **kwargs)
    assert not graph.tasks


MACHINES = [asc.Machine.emulated(gpus=0), asc.Machine.emulated(gpus=1, storage=1e9)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("change", ["gone", "longer", "shorter"])
def test_a_file_that_changed_is_noticed_and_may_come_back(
    tmp_path: Path, machine: asc.Machine, change: str
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    before = path.read_bytes()
    graph = asc.Graph()
    graph.output(w=graph.read(path, "w"))
    with asc.schedule(graph, machine) as schedule:
        assert schedule()["w"].tolist() == [0, 0]
        if change == "gone":
            path.unlink()
        else:
            path.write_bytes(before + b" " if change == "longer" else before[:-1])
        message = "cannot be read: No such file" if change == "gone" else "when the graph was made"
        for run in (schedule, graph.run_serial):
            with pytest.raises((asc.StorageError, asc.TaskError), match=message):
                run()
        save_file({"w": torch.ones(2)}, path)
        assert schedule()["w"].tolist() == [1, 1]


def test_another_header_is_noticed_and_other_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    graph = asc.Graph()
    graph.output(w=graph.read(path, "w"))
    save_file({"w": torch.ones(2)}, path)
    assert graph.run_serial()["w"].tolist() == [1, 1]
    size = path.stat().st_size
    for other in ({"w": torch.ones(2, dtype=torch.int32)}, {"v": torch.ones(2)}):
        save_file(other, path)
        assert path.stat().st_size == size
        with pytest.raises((asc.StorageError, asc.TaskError), match="has another header than when"):
            graph.run_serial()


@pytest.mark.parametrize("device", ["disk:0", "storage"])
def test_storage_runs_no_tasks_and_holds_no_inputs_or_outputs(device: str) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    y = x + 1
    graph.output(y)
    machine = asc.Machine.emulated(gpus=1, storage=1e9)
    message = f"'{device}' is storage, and runs no tasks"
    with pytest.raises(asc.GraphError, match=message):
        graph.add(abs, x, on=device)
    with pytest.raises(asc.GraphError, match=message), graph.on(device):
        pass
    with pytest.raises(asc.GraphError, match=message):
        x.to(device)
    with pytest.raises(asc.GraphError, match=message):
        asc.schedule(graph, machine, inputs=device)
    with pytest.raises(asc.GraphError, match=message):
        asc.schedule(graph, machine, place={"*": device})
    with pytest.raises(asc.GraphError, match=message):
        asc.Graph().include(graph, {"x": x}, on=device)
    if device == "disk:0":
        with pytest.raises(
            asc.ScheduleError, match="'add' cannot be on 'disk:0', which is storage"
        ):
            asc.schedule(graph, machine, outputs=device)


def test_included_reads_stay_on_storage(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    layer = asc.Graph("layer")
    layer.output(y=layer.input("x") + layer.read(path, "w"))
    net = asc.Graph("net")
    net.output(**net.include(layer, {"x": net.input("x")}, prefix="0.", on="cuda:0"))
    schedule = asc.schedule(net, asc.Machine.emulated(gpus=1, storage=1e9))
    assert schedule.placement.device == {"0.w": "disk:0", "0.add": "cuda:0"}
