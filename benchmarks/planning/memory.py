"""Half of the memory: networks of others planned again on devices with half of the bytes that the first plan held.

They are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
read from the folder ``dnn_placement`` of ``--data``: one CPU without a limit and accelerators, in the machine as it is,
with copy streams. Their ``size`` is what a node needs on its device, and is read in two ways: as the bytes of what the
node makes; or as what it makes, by the size of its edges, and a constant for the rest, which lives on the host. The
limit is half of the highest peak for all accelerators, or for each half of its own. "At least" is what every schedule
under that limit takes by its lower bound, which knows that no task can run where it would not fit alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from _report import table

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.program.program import Copy

_COLUMNS = ("ms", "more", "at least", "copies")
HEAD = (
    "",
    "without, ms",
    "peak, MB",
    *(f"{half}: {word}" for half in ("half for all", "of each") for word in _COLUMNS),
    "s",
)
_RATE = 2.0**31  # bytes per second between host and accelerator, by sizes and costs of the edges
_WEIGHTS = {"made": "as what is made", "constants": "as constants"}


def _node(*_: object) -> object:
    """Stand for any task."""
    return object()


def dnn(
    path: Path, accelerators: int, constants: bool, *, contention: bool = True
) -> tuple[asc.Graph, asc.Machine]:
    """Read a network, and make its machine. Copies between accelerators go through the host, and take twice as long.

    ``constants``: what a node needs beyond the size of its edges is a constant that it reads.
    """
    told = json.loads(path.read_text())
    readers: dict[int, list[int]] = {node["id"]: [] for node in told["nodes"]}
    edges: dict[int, float] = {}
    for edge in told["edges"]:
        readers[edge["destId"]].append(edge["sourceId"])
        edges[edge["sourceId"]] = edge["cost"] / 1e3 * _RATE
    names = [f"cuda:{p}" for p in range(accelerators)]
    graph, values, colours = (
        asc.Graph(path.stem),
        dict[int, asc.Value](),
        dict[int, list[asc.Value]](),
    )
    nodes = {node["id"]: node for node in told["nodes"]}
    for number in _sorted(readers):
        node, made = nodes[number], edges.get(number, 0.0) if constants else nodes[number]["size"]
        reads = [values[before] for before in readers[number]]
        if constants and node["size"] > made:
            reads.append(graph.constant(object(), f"weight{number}"))
            reads[-1].nbytes = int(node["size"] - made)
        on = dict.fromkeys(names, node["fpgaLatency"] / 1e3) if node["supportedOnFpga"] else {}
        seconds = {"cpu": node["cpuLatency"] / 1e3, **on}
        values[number] = graph.add(
            _node, *reads, name=f"n{number}", seconds=seconds, nbytes=int(made)
        )
        colours.setdefault(node.get("colorClass", -number), []).append(values[number])
    for kept in colours.values():
        if len(kept) > 1:
            graph.together(*kept)
    graph.output(
        *(
            values[number]
            for number in values
            if not any(number in before for before in readers.values())
        )
    )
    links = [asc.Link("cpu", name, _RATE) for name in names]
    links += [asc.Link(a, b, _RATE / 2) for i, a in enumerate(names) for b in names[i + 1 :]]
    devices = [asc.Device(name, launch_seconds=0.0) for name in ("cpu", *names)]
    return graph, asc.Machine(devices, links, contention=contention, imagined=True)


def _sorted(readers: dict[int, list[int]]) -> Iterator[int]:
    """Yield nodes behind those that they read, as they stand in the file otherwise."""
    import networkx as nx

    dag = nx.DiGraph()
    dag.add_nodes_from(readers)
    dag.add_edges_from((u, v) for v, before in readers.items() for u in before)
    position = {number: i for i, number in enumerate(readers)}
    yield from nx.lexicographical_topological_sort(dag, key=position.__getitem__)


def limited(machine: asc.Machine, nbytes: dict[str, float]) -> asc.Machine:
    """Return a machine whose devices have so many bytes."""
    devices = [
        replace(device, nbytes=nbytes.get(device.name, device.nbytes)) for device in machine.devices
    ]
    return asc.Machine(devices, machine.links, contention=machine.contention, imagined=True)


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the table, where there is data."""
    paths = sorted((chosen.data / "dnn_placement").glob("*Graphs/*.json")) if chosen.data else []
    if chosen.quick:
        paths = paths[:2]
    counts = (2,) if chosen.quick else (2, 4, 8)
    rows = [_row(path, count, how) for path in paths for how in _WEIGHTS for count in counts]
    yield table(HEAD, rows) if rows else "No data was given."


def _row(path: Path, accelerators: int, how: str) -> tuple[str, ...]:
    graph, machine = dnn(path, accelerators, how == "constants")
    free = asc.schedule(graph, machine)
    peak = {name: free.peak_bytes[name] for name in machine.accelerators}
    start = time.perf_counter()
    each = [
        _beside(graph, machine, free, dict.fromkeys(peak, max(peak.values()) / 2)),
        _beside(
            graph, machine, free, {name: max(1.0, nbytes / 2) for name, nbytes in peak.items()}
        ),
    ]
    took = (time.perf_counter() - start) / 2
    kind = "operators" if "Operator" in path.parent.name else "layers"
    name = f"{path.stem.removesuffix('_inference')}, {kind}, {_WEIGHTS[how]}, {accelerators} accelerators"
    numbers = [item for found in each for item in found]
    return (
        name,
        f"{free.makespan * 1e3:.2f}",
        f"{max(peak.values()) / 1e6:.0f}",
        *numbers,
        f"{took:.1f}",
    )


def _beside(
    graph: asc.Graph, machine: asc.Machine, free: asc.Schedule, nbytes: dict[str, float]
) -> tuple[str, ...]:
    """Return the makespan under a limit, how much more that is than without, and must be, and how many more copies."""
    try:
        found = asc.schedule(graph, limited(machine, nbytes))
    except MemoryLimitError as error:
        return ("proved impossible" if "This proves" in str(error) else "none found", "", "", "")
    for name, limit in nbytes.items():
        assert found.peak_bytes[name] <= limit, (
            f"{name} holds {found.peak_bytes[name]} of {limit} B"
        )
    more = sum(isinstance(i, Copy) for i in found.program) - sum(
        isinstance(i, Copy) for i in free.program
    )
    over = (
        f"{seconds / free.makespan - 1:+.1%}" for seconds in (found.makespan, found.lower_bound)
    )
    return f"{found.makespan * 1e3:.2f}", *over, f"{more:+d}"
