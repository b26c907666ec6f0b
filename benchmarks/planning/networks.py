"""Networks of others, for one sample: layer and operator graphs of BERT, GNMT, Inception-v3 and ResNet-50.

They are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
read from the folder ``dnn_placement`` of ``--data``: one CPU and accelerators, in milliseconds, in the classic model.
One device is often best here, and list scheduling is worse than that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from _graphs import network_file
from _ours import planned
from _report import table

HEAD = ("", "tasks", "bound, ms", "one device", "heft", "auto", "auto: s", "target")


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the table, where there is data."""
    paths = sorted((chosen.data / "dnn_placement").glob("*Graphs/*.json")) if chosen.data else []
    if chosen.quick:
        paths = [path for path in paths if _name(path) == "resnet50, operators"]
    yield (
        table(HEAD, [row for path in paths for row in _rows(path, chosen)])
        if paths
        else "No data was given."
    )


def _name(path: Path) -> str:
    return f"{path.stem.removesuffix('_inference')}, {'operators' if 'Operator' in path.parent.name else 'layers'}"


def _rows(path: Path, chosen: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for k in (2,) if chosen.quick else (2, 4, 8):
        one = network_file(path, k)
        single, heft, auto = (planned(one, policy) for policy in ("single", "heft", "auto"))
        bound = max(single.bound, heft.bound, auto.bound)
        figures = (
            f"{x:.2f}" for x in (bound, single.makespan, heft.makespan, auto.makespan, auto.seconds)
        )
        target = "at most 313" if _name(path) == "resnet50, operators" else "at most one device"
        yield (f"{_name(path)}, {k} accelerators", str(len(one)), *figures, target)
