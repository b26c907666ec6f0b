"""Weights are read from files while layers compute, compared with reading them first.

A model of linear layers on one CPU, with its weights in one file of safetensors. Before each run
the system is asked to drop the file from memory. All ways take turns; the fastest run of each
counts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _report import options, publish, table
from safetensors.torch import load_file, save_file

import autosched as asc

Ways = dict[str, Callable[[], object]]


def dropped(path: Path) -> None:
    """Ask the system to read a file from its device the next time."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stored(path: Path, width: int, layers: int) -> asc.Graph:
    """Write the weights of a model to a file; return the graph that reads and applies them."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layer{i}": torch.rand(width, width, generator=generator) / width for i in range(layers)
    }
    save_file(weights, path)
    graph = asc.Graph("layers")
    x = graph.input("x")
    for value in graph.read(path).values():
        x = x @ value
    graph.output(y=x)
    return graph


def minima(ways: Ways, path: Path, repeat: int) -> dict[str, float]:
    """Return the least seconds of each way; all take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat + 1):
        for name, run in ways.items():
            dropped(path)
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def compared(path: Path, width: int, layers: int, rows: int, repeat: int) -> list[str]:
    """Return a row of the table for batches of so many rows."""
    graph = stored(path, width, layers)
    x = torch.rand(rows, width, generator=torch.Generator().manual_seed(1))
    plain = asc.Machine.local(gpus=0)
    machine = asc.measure_storage(path, plain, repeat=3)
    costs = asc.measure_costs(graph, plain, {"x": x}, repeat=3)
    expected = graph.run_serial(x=x)["y"]

    def compute(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        y = x
        for weight in weights.values():
            y = y @ weight
        return y

    loaded = {name: tensor.clone() for name, tensor in load_file(path).items()}
    names = [value.name for value in graph.values if value.name in loaded]
    with (
        asc.schedule(graph, machine, costs=costs) as during,
        asc.schedule(graph, plain, costs=costs) as inside,
    ):
        assert torch.equal(during(x=x)["y"], expected)
        assert torch.equal(inside(x=x)["y"], expected)

        def first() -> torch.Tensor:
            tensors = load_file(path)  # maps the file, and reads it when it is used
            return compute({name: tensors[name].clone() for name in names})

        best = minima(
            {
                "during": lambda: during(x=x),
                "inside": lambda: inside(x=x),
                "first": first,
                "read": lambda: [tensor.clone() for tensor in load_file(path).values()],
                "compute": lambda: compute({name: loaded[name] for name in names}),
            },
            path,
            repeat,
        )
        predicted = during.makespan
    kinds = ("read", "compute", "first", "inside", "during")
    return [
        str(rows),
        *(f"{best[kind] * 1e3:.1f} ms" for kind in kinds),
        f"{predicted * 1e3:.1f} ms",
    ]


def report(width: int, layers: int, rows: tuple[int, ...], repeat: int) -> Iterator[str]:
    """Yield the parts of the report."""
    head = ["rows", "read", "compute", "load_file, then compute", "host reads each", "reads during"]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "model.safetensors"
        found = [compared(path, width, layers, count, repeat) for count in rows]
    yield (
        f"{layers} layers of {width} x {width} numbers, {layers * width * width * 4 / 1e6:.0f} MB. "
        "No run can take less than the larger of `read` and `compute`."
    )
    yield table([*head, "predicted"], found)


def main() -> None:
    chosen = options(__doc__)
    sizes = (512, 8, (64, 512), 3) if chosen.quick else (2048, 16, (64, 256, 1024), 7)
    title = "Reading weights while layers compute"
    publish("storage", title, report(*sizes), chosen, packages=("torch", "safetensors"))


if __name__ == "__main__":
    main()
