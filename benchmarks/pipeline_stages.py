"""Compare how models are cut into stages with the optimum, for published profiles.

``pipeline_stages.csv`` has the milliseconds and parameters of layers that Narayanan et al., "PipeDream", SOSP 2019,
measured: github.com/msr-fiddle/pipedream (MIT licence), ``profiler/*/profiles/*/graph.txt``; layers without effect on
stages are left out. As in their optimizer, a stage takes as long as its layers, forward and backward.

The optimum is that of all cuts of the graph into stages that follow one another, one on each device, by dynamic
programming; it equals what their optimizer finds. ``pipeline`` is the slowest stage of ``asc.parallel.pipeline``, which
cuts sequences of layers; ``period`` that of a schedule with ``objective="period"``: devices may have any layers.
With r replicas, each of d / r stages, a stage takes an r-th of its time, and its gradients are exchanged, as in their
optimizer: 4 (r - 1) / r / r times the milliseconds in which a link sends its parameters. The best r is given.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from _report import options, publish, table

import autosched as asc
from autosched.graph.task import Origin
from autosched.parallel.stages import Cuts, balanced

FILE = Path(__file__).with_suffix(".csv")
# By network: milliseconds of the slowest stage on 4 and 8 devices by PipeDream's own optimizer.
PUBLISHED = {
    "vgg16": (216.450, 159.531),
    "alexnet": (28.721, 28.721),
    "gnmt": (25.868, 19.032),
    "resnet18": (69.523, 35.207),
}
RATES = (1.0, 12.5)  # of links, in GB/s


class Layer(NamedTuple):
    """What was measured of a layer, and which layers read its result."""

    forward: float  # milliseconds
    backward: float
    parameters: float  # bytes
    followers: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Milliseconds, forward and backward."""
        return self.forward + self.backward


Network = dict[str, Layer]  # in an order in which they can run


def networks() -> dict[str, Network]:
    found: dict[str, Network] = {}
    with FILE.open() as file:
        for name, node, *numbers, followers in itertools.islice(csv.reader(file), 1, None):
            found.setdefault(name, {})[node] = Layer(*map(float, numbers), tuple(followers.split()))
    return found


def optimum(network: Network, stages: int) -> float:
    """Return the time of the slowest stage, at best: over all sets of layers that end after a stage."""
    before = {node: {n for n, one in network.items() if node in one.followers} for node in network}
    ends = {frozenset[str]()}
    waiting = list(ends)
    while waiting:
        done = waiting.pop()
        ready = (node for node in network if node not in done and before[node] <= done)
        for end in {done | {node} for node in ready} - ends:
            ends.add(end)
            waiting.append(end)
    work = {end: sum(network[node].seconds for node in end) for end in ends}
    best = work
    for _ in range(stages - 1):
        best = {
            end: min(max(best[other], work[end] - work[other]) for other in ends if other <= end)
            for end in ends
        }
    return best[frozenset(network)]


def machine_of(devices: int) -> asc.Machine:
    names = ["cpu", *(f"cuda:{rank}" for rank in range(devices))]
    links = [asc.Link(a, b, 1e30, 0.0) for a, b in itertools.combinations(names, 2)]
    return asc.Machine(map(asc.Device, names), links)


def step_of(network: Network) -> asc.Graph:
    """Return forward and backward of all layers, as a captured step has them."""
    graph = asc.Graph()
    made: dict[str, asc.Value] = {}
    inputs: dict[str, list[asc.Value]] = {node: [] for node in network}
    for node, one in network.items():
        made[node] = add(graph, f"{node}.forward", inputs[node], one.forward)
        for follower in one.followers:
            inputs[follower].append(made[node])
    back: dict[str, asc.Value] = {}
    for node, one in reversed(network.items()):
        after = [made[node], *(back[follower] for follower in one.followers)]
        back[node] = add(graph, f"{node}.backward", after, one.backward)
    graph.output(y=back[next(iter(network))])
    return graph


def add(graph: asc.Graph, name: str, inputs: list[asc.Value], seconds: float) -> asc.Value:
    node, _, phase = name.partition(".")
    facts = {"name": name, "origin": Origin(("", 0), node, phase)}
    made: asc.Value = graph.record(max, tuple(inputs), {}, seconds=seconds, nbytes=0, **facts)
    return made


def cut(network: Network, devices: int) -> Cuts:
    machine, graph = machine_of(devices), step_of(network)
    return balanced(graph, asc.Costs(), machine, machine.accelerators)


def period(network: Network, devices: int) -> float:
    graph, machine = asc.Graph(), machine_of(devices)
    inputs: dict[str, list[asc.Value]] = {node: [] for node in network}
    for node, one in network.items():
        seconds = dict.fromkeys(machine.accelerators, one.seconds)
        made = graph.add(max, *inputs[node], name=node, seconds=seconds, nbytes=0)
        for follower in one.followers:
            inputs[follower].append(made)
    graph.output(y=made)
    return asc.schedule(graph, machine, objective="period").period


def replicated(network: Network, devices: int, rate: float) -> tuple[float, int]:
    """Return the time of the slowest stage by micro-batch, and the number of replicas with the least."""
    found = []
    for replicas in (r for r in range(1, devices + 1) if devices % r == 0):
        cuts = cut(network, devices // replicas)
        names = [block.name for block in cuts.blocks]
        slowest = 0.0
        for start, end in itertools.pairwise((0, *cuts.ends)):
            own = [network[name] for name in names[start:end]]
            sending = (
                4 * (replicas - 1) / replicas * sum(one.parameters for one in own) / (rate * 1e6)
            )
            slowest = max(slowest, (sum(one.seconds for one in own) + sending) / replicas)
        found.append((slowest, replicas))
    return min(found)


def rows() -> Iterator[tuple[str, ...]]:
    for name, network in networks().items():
        alone = sum(one.seconds for one in network.values())
        for devices, published in zip((4, 8), PUBLISHED[name], strict=True):
            best = optimum(network, devices)
            ours = max(cut(network, devices).seconds)
            assert math.isclose(best, published, abs_tol=1e-3), (name, devices, best)
            several = [replicated(network, devices, rate) for rate in RATES]
            yield (
                name, f"{devices}", f"{alone:.3f}", f"{best:.3f}",
                f"{ours:.3f} ({ours / best:.3f})", f"{period(network, devices):.3f}",
                *(f"{slowest:.3f} ({replicas})" for slowest, replicas in several),
            )  # fmt: skip


def main() -> None:
    chosen = options(__doc__)
    head = (
        "network",
        "devices",
        "on one",
        "optimum",
        "pipeline",
        "period",
        *(f"replicas, {rate:g} GB/s" for rate in RATES),
    )
    publish(
        "pipeline_stages",
        "Stages of pipelines, beside the optimum",
        [
            " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
            "Milliseconds of the slowest stage for a micro-batch:",
            table(head, rows()),
        ],
        chosen,
        packages=("torch", "numpy"),
    )


if __name__ == "__main__":
    main()
