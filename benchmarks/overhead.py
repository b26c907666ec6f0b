"""Overhead of a task: 1,000 ``torch.add`` on 16 floats, compared with a hand-written loop.

And that of calls with many inputs, and of the guard of a compiled function: see ``_calls``.

All contenders run the same calls on the same graph, in turns, so that noise affects all equally.
The slow ones have a turn in some rounds only.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import dask.threaded
import torch
from _calls import tables as of_calls
from _report import options, publish, table
from torch import Tensor, fx

import autosched as asc

TASKS = 1000
WORKERS = 2
Contender = Callable[[], Any]


def chain(x: Tensor, y: Tensor) -> list[Tensor]:
    """Add to the last result, repeatedly."""
    for _ in range(TASKS):
        x = torch.add(x, y)
    return [x]


def fan_out(x: Tensor, y: Tensor) -> list[Tensor]:
    """Add to the input, independently."""
    results = []
    for _ in range(TASKS):
        results.append(torch.add(x, y))
    return results


def sources(is_chain: bool) -> list[int | None]:
    """Return the predecessor of each task; None for the input."""
    return [i - 1 if is_chain and i else None for i in range(TASKS)]


def schedule(is_chain: bool, backend: str) -> asc.Schedule:
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    values: list[asc.Value] = []
    for source in sources(is_chain):
        values.append(graph.add(torch.add, x if source is None else values[source], y))
    graph.output(*(values[-1:] if is_chain else values))
    return asc.schedule(graph, asc.Machine.local(gpus=0), policy="single", backend=backend)


def dask_graph(is_chain: bool, x: Tensor, y: Tensor) -> tuple[dict[str, Any], list[str]]:
    graph: dict[str, Any] = {"x": x, "y": y}
    for i, source in enumerate(sources(is_chain)):
        graph[f"add{i}"] = (torch.add, "x" if source is None else f"add{source}", "y")
    keys = [f"add{i}" for i in range(TASKS)]
    return graph, keys[-1:] if is_chain else keys


def futures(pool: ThreadPoolExecutor, is_chain: bool, x: Tensor, y: Tensor) -> list[Tensor]:
    """Submit all tasks in order; each waits for its predecessor."""

    def add(before: Future[Tensor] | None) -> Tensor:
        return torch.add(x if before is None else before.result(), y)

    made: list[Future[Tensor]] = []
    for source in sources(is_chain):
        made.append(pool.submit(add, None if source is None else made[source]))
    return [future.result() for future in (made[-1:] if is_chain else made)]


def contenders(
    is_chain: bool, pool: ThreadPoolExecutor
) -> tuple[dict[str, Contender], dict[str, Contender]]:
    """Return the quick and the slow ones. Each returns the results in a list or a dict."""
    x, y = torch.rand(16), torch.rand(16)
    loop = chain if is_chain else fan_out
    module = fx.symbolic_trace(loop)
    interpreter = fx.Interpreter(module)
    host, threads = schedule(is_chain, "host"), schedule(is_chain, "threads")
    tasks, keys = dask_graph(is_chain, x, y)
    quick = {
        "loop by hand": lambda: loop(x, y),
        "autosched, host": lambda: host(x=x, y=y),
        "autosched, threads": lambda: threads(x=x, y=y),
        "torch.fx.GraphModule": lambda: module(x, y),
    }
    slow = {
        "torch.fx.Interpreter": lambda: interpreter.run(x, y),
        "concurrent.futures": lambda: futures(pool, is_chain, x, y),
        "dask.threaded.get": lambda: dask.threaded.get(tasks, keys, num_workers=WORKERS),
    }
    return quick, slow


def race(
    quick: Mapping[str, Contender], slow: Mapping[str, Contender], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each call. The first one changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in (*quick, *slow)}
    names = list(quick)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first], *(slow if turn % 20 == 0 else ())):
            call = quick.get(name) or slow[name]
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def check(calls: Mapping[str, Contender]) -> None:
    """Call each once, and compare the results."""
    results = [
        list(result.values()) if isinstance(result := call(), dict) else list(result)
        for call in calls.values()
    ]
    for name, result in zip(calls, results, strict=True):
        assert len(result) == len(results[0]), name
        assert all(map(torch.equal, result, results[0])), name


def measured(is_chain: bool, pool: ThreadPoolExecutor, rounds: int) -> str:
    """Return the table of one graph."""
    quick, slow = contenders(is_chain, pool)
    check({**quick, **slow})
    gc.collect()
    gc.freeze()
    seconds = race(quick, slow, rounds)
    micro = {name: [t / TASKS * 1e6 for t in found] for name, found in seconds.items()}
    figures = {name: (statistics.median(found), min(found)) for name, found in micro.items()}
    median, least = figures["loop by hand"]
    rows = [
        [
            name,
            f"{a:.2f}",
            f"{a / median:.2f}",
            f"{b:.2f}",
            f"{b / least:.2f}",
            str(len(seconds[name])),
        ]
        for name, (a, b) in figures.items()
    ]
    return table(
        ["", "median us/task", "times the loop", "least us/task", "times the loop", "runs"], rows
    )


def main() -> None:
    chosen = options(__doc__)
    rounds = 400 if chosen.quick else 4000
    torch.set_num_threads(1)
    with torch.no_grad(), ThreadPoolExecutor(WORKERS) as pool:
        calls = of_calls(rounds // 4)
        tables = [
            f"{title}\n\n{measured(is_chain, pool, rounds)}"
            for title, is_chain in (
                ("## Chain: each task reads the result of the one before", True),
                ("## Fan-out: independent tasks", False),
            )
        ]
    target = "Target: `host` and `threads` at most 1.2 times the loop."
    publish(
        "overhead",
        f"Overhead of {TASKS:,} tasks",
        [*tables, target, *calls],
        chosen,
        ("torch", "dask"),
    )


if __name__ == "__main__":
    main()
