"""Several runs in flight: throughput against the busiest device, against separate calls, and per run.

Emulated devices take their modelled time, so the first two tables say what the schedules reach and
not how fast this computer is. The others are measured on its cores.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from _report import options, publish, table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import autosched as asc

SECONDS = 0.02  # of a stage
IN_FLIGHT = 4
BYTES_PER_SECOND = 1e9
MACHINE = asc.Machine.emulated(gpus=4, bytes_per_second=BYTES_PER_SECOND, latency=1e-4)
SMALL = 16  # floats
IN_STREAM = 8  # tiny runs in flight


# ---- emulated devices


def total(*tensors: Tensor) -> Tensor:
    """Do a little work."""
    return torch.stack(tensors).sum(0)


def stages(*seconds: float, nbytes: float = 1e5) -> asc.Graph:
    """Return a chain of tasks, each on a GPU of its own."""
    graph = asc.Graph(f"{len(seconds)} stages")
    value = graph.input("x")
    for i, each in enumerate(seconds):
        value = graph.add(total, value, on=f"cuda:{i}", seconds=each, nbytes=nbytes)
    graph.output(y=value)
    return graph


def diamond() -> asc.Graph:
    """Return a graph of four tasks, of which two are between the others, on four GPUs.

    Streams are in order: a device with the first and the last task would wait in between.
    """
    graph = asc.Graph("diamond")
    first = graph.add(total, graph.input("x"), on="cuda:0", seconds=SECONDS / 2, nbytes=1e5)
    branches = [
        graph.add(total, first, on=f"cuda:{i}", seconds=SECONDS, nbytes=1e5) for i in (1, 2)
    ]
    graph.output(y=graph.add(total, *branches, on="cuda:3", seconds=SECONDS / 2, nbytes=1e5))
    return graph


def copying() -> asc.Graph:
    """Return a copy in, a task and a copy out, of equal length."""
    graph = asc.Graph("copy, compute, copy")
    nbytes = SECONDS * BYTES_PER_SECOND
    x = graph.add(total, graph.input("x"), on="cpu", seconds=0, nbytes=nbytes)
    y = graph.add(total, x, on="cuda:0", seconds=SECONDS, nbytes=nbytes)
    graph.output(y=y)
    return graph


def per_run(schedule: asc.Schedule, runs: int) -> float:
    """Return the seconds per run in steady state, of runs submitted without delay."""
    x = torch.rand(SMALL)
    schedule(x=x)  # the first run is checked
    warm = schedule.program.in_flight
    futures = [schedule.submit(x=x) for _ in range(warm)]
    futures[-1].result()
    start = time.perf_counter()
    for future in [schedule.submit(x=x) for _ in range(runs)]:
        future.result()
    return (time.perf_counter() - start) / runs


def emulated(runs: int) -> Iterator[list[str]]:
    """Yield a row for each graph: the time per run, compared with the busiest device."""
    cases = {
        "two equal stages": stages(SECONDS, SECONDS),
        "three unequal stages": stages(SECONDS, SECONDS / 2, SECONDS / 4),
        "a diamond": diamond(),
        "copies take longest": stages(SECONDS / 4, SECONDS / 4, nbytes=SECONDS * BYTES_PER_SECOND),
    }
    for name, graph in cases.items():
        with asc.schedule(graph, MACHINE, policy="single", in_flight=IN_FLIGHT) as schedule:
            bound = schedule.period_bound
            measured = per_run(schedule, runs)
            facts = [schedule.makespan, bound, schedule.period, measured]
        yield [name, *(f"{each * 1e3:.1f}" for each in facts), f"{measured / bound:.3f}"]


def separate(runs: int) -> list[str]:
    """Compare the runs of a loop of copies and a task with separate calls."""
    x = torch.rand(SMALL)
    found = []
    for in_flight in (1, IN_FLIGHT):
        options = {"policy": "single", "outputs": "cpu", "in_flight": in_flight}
        with asc.schedule(copying(), MACHINE, **options) as schedule:
            if in_flight > 1:
                found.append(per_run(schedule, runs))
                continue
            schedule(x=x)
            start = time.perf_counter()
            for _ in range(runs // 4):
                schedule(x=x)
            found.append((time.perf_counter() - start) / (runs // 4))
    calls, loop = found
    return [f"{calls * 1e3:.1f}", f"{loop * 1e3:.1f}", f"{calls / loop:.2f}"]


# ---- the cost of a run


def steps(batches: int) -> Iterator[list[str]]:
    """Yield the time of training steps, called and in flight, whose batch takes long to copy."""
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=3e10).slower(300)
    wide = 2048
    given = [(torch.randn(256, wide), torch.randn(256, 8)) for _ in range(batches)]
    for system in (asc.parallel.data_parallel, asc.parallel.pipeline):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(wide, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with system(model, nn.MSELoss(), optimizer, machine, in_flight=2) as step:
            step(*given[0])
            seconds = []
            for losses in (itertools.starmap(step, given), step.map(given)):
                start = time.perf_counter()
                for _ in losses:
                    pass
                seconds.append((time.perf_counter() - start) / batches)
            schedule = step.schedule(*given[0])
        called, flown = seconds
        known = (called, schedule.makespan, flown, schedule.period)
        yield [system.__name__, *(f"{each * 1e3:.1f}" for each in known), f"{called / flown:.2f}"]


def least(call: Callable[[], object], calls: int, rounds: int) -> float:
    """Return microseconds of a call: of several rounds the shortest."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(time.perf_counter() - start)
    return min(found) / calls * 1e6


def tiny() -> asc.Graph:
    """Return two tiny tasks, each on a stream of its own."""
    graph = asc.Graph("tiny")
    x = graph.add(torch.add, graph.input("x"), 1, name="add")
    graph.output(y=graph.add(torch.mul, x, 2, name="mul"), z=graph.add(torch.neg, x, name="neg"))
    return graph


def two_threads(*_: Any) -> asc.Placement:
    """Place the tasks of ``tiny`` on one device with two streams."""
    return asc.Placement(dict.fromkeys(("add", "mul", "neg"), "cpu"), ("add", "mul", "neg"))


@contextlib.contextmanager
def waking() -> Iterator[Callable[[], object]]:
    """Yield a function that wakes a thread, which does nothing but wake the caller."""
    queue: SimpleQueue[bool] = SimpleQueue()
    woken = threading.Lock()
    woken.acquire()

    def serve() -> None:
        while queue.get():
            woken.release()

    def there_and_back() -> None:
        queue.put(True)
        woken.acquire()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield there_and_back
    finally:
        queue.put(False)
        thread.join()


def overhead(rounds: int) -> Iterator[list[str]]:
    """Yield what a call costs, what submitting and waiting costs, and what waking a thread costs."""
    machine = asc.Machine([asc.Device("cpu", streams=2)])
    x = torch.rand(SMALL)
    for backend in ("host", "threads"):
        chosen = {"policy": two_threads, "backend": backend}
        with (
            asc.schedule(tiny(), machine, **chosen) as one,
            asc.schedule(tiny(), machine, **chosen, in_flight=IN_FLIGHT) as loop,
            waking() as there_and_back,
        ):
            for schedule in (one, loop):
                schedule(x=x)
            calls: list[float] = []
            submitted: list[float] = []
            woken: list[float] = []
            for _ in range(rounds):  # in turns, so that noise affects all
                woken.append(least(there_and_back, 200, 1))
                calls.append(least(lambda run=one: run(x=x), 200, 1))
                submitted.append(least(lambda run=loop: run.submit(x=x).result(), 200, 1))
        difference = min(submitted) - min(calls)
        known = (min(calls), min(submitted), difference, min(woken))
        yield [backend, *(f"{each:.0f}" for each in known)]


def stream(runs: int) -> Iterator[list[str]]:
    """Yield the time of many tiny runs over two threads."""
    x = torch.rand(SMALL)
    machine = asc.Machine([asc.Device("cpu", streams=2)])
    chosen = {"policy": two_threads, "backend": "threads", "in_flight": IN_STREAM}
    with asc.schedule(tiny(), machine, **chosen) as schedule:
        schedule(x=x)
        start = time.perf_counter()
        for _ in schedule.map(x for _ in range(runs)):
            pass
        yield ["autosched", f"{(time.perf_counter() - start) / runs * 1e6:.0f}"]
    if importlib.util.find_spec("ray") is None:
        yield ["Ray Compiled Graphs", "`ray` is not installed"]
    else:
        yield ["Ray Compiled Graphs", f"{ray_compiled(x, runs) * 1e6:.0f}"]


def ray_compiled(x: Tensor, runs: int) -> float:
    """Return the seconds per run of the same graph in Ray's compiled graphs, in two processes."""
    ray = importlib.import_module("ray")
    dag = importlib.import_module("ray.dag")

    @ray.remote
    class Worker:
        def call(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
            return function(*args)

    ray.init(include_dashboard=False, log_to_driver=False)
    one, two = Worker.remote(), Worker.remote()
    with dag.InputNode() as given:
        added = one.call.bind(torch.add, given, 1)
        results = [one.call.bind(torch.mul, added, 2), two.call.bind(torch.neg, added)]
        compiled = dag.MultiOutputNode(results).experimental_compile(
            _max_inflight_executions=IN_STREAM
        )
    try:
        y, z = ray.get(compiled.execute(x))
        assert torch.equal(y, (x + 1) * 2)
        assert torch.equal(z, -(x + 1))
        start = time.perf_counter()
        waiting: list[Any] = []
        for _ in range(runs):
            if len(waiting) == IN_STREAM:
                ray.get(waiting.pop(0))
            waiting.append(compiled.execute(x))
        for run in waiting:
            ray.get(run)
        return (time.perf_counter() - start) / runs
    finally:
        compiled.teardown()
        ray.shutdown()


# ---- real cores: one stream loads and augments images, the other trains

PIXELS, BATCH = 48, 32


def augment(images: Tensor) -> Tensor:
    """Enlarge, blur and normalize a batch."""
    large = functional.interpolate(images, scale_factor=2.0, mode="bicubic")
    blurred = functional.avg_pool2d(large, 5, 1, 2)
    flipped = torch.where(blurred[:, :1] > blurred.mean(), blurred.flip(3), blurred)
    return functional.interpolate(flipped, size=PIXELS, mode="area") - 0.5


def loaded(number: int) -> Tensor:
    """Return a batch, from a file in practice."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(BATCH, 3, PIXELS, PIXELS, generator=generator)


class Images(Dataset[Tensor]):
    """Batches that were loaded and augmented."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        return augment(loaded(number))


class Trainer(nn.Module):
    """A small network that is trained to predict the brightness of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 48, 3, 2), nn.ReLU(), nn.Conv2d(48, 64, 3, 2), nn.ReLU(), nn.Flatten()
        )
        self.net.append(nn.LazyLinear(1))
        self.net(torch.zeros(1, 3, PIXELS, PIXELS))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        """Train on a batch; return the loss."""
        with torch.enable_grad():
            loss = (self.net(images).squeeze(1) - images.mean((1, 2, 3))).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.detach()


def pipeline(trainer: Trainer) -> asc.Schedule:
    """Return a schedule that augments on one stream and trains on another."""
    graph = asc.Graph("load and train")
    images = graph.add(lambda number: augment(loaded(number)), graph.input("number"), name="load")
    loss = graph.add(trainer, images, name="train")
    graph.output(loss=loss)
    machine = asc.Machine([asc.Device("cpu", streams=1), asc.Device("cpu:1", streams=1)])
    machine = asc.Machine(machine.devices, [asc.Link("cpu", "cpu:1", 1e10)])
    placement = asc.Placement({"load": "cpu", "train": "cpu:1"}, ("load", "train"))
    return asc.schedule(graph, machine, policy=lambda *_: placement, in_flight=2, backend="threads")


def training(batches: int, rounds: int) -> Iterator[list[str]]:
    """Yield the time per batch of each way, measured in turns."""
    losses: dict[str, Sequence[float]] = {}
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, way in (("separate calls", separately), ("DataLoader", data_loader)):
            seconds.setdefault(name, []).append(_timed(name, losses, way(batches)) / batches)
        trainer = Trainer()
        with pipeline(trainer) as schedule:
            runs = (out["loss"] for out in schedule.map(range(batches)))
            name = "two runs in flight"
            seconds.setdefault(name, []).append(_timed(name, losses, runs) / batches)
    assert len({tuple(found) for found in losses.values()}) == 1, "they do not compute the same"
    for name, found in seconds.items():
        best = statistics.median(found)
        yield [
            name,
            f"{best * 1e3:.1f}",
            f"{statistics.median(seconds['separate calls']) / best:.2f}",
        ]


def _timed(name: str, losses: dict[str, Sequence[float]], results: Iterable[Tensor]) -> float:
    gc.collect()
    start = time.perf_counter()
    losses[name] = [loss.item() for loss in results]
    return time.perf_counter() - start


def separately(batches: int) -> Iterator[Tensor]:
    """Load and train in turns."""
    trainer = Trainer()
    for number in range(batches):
        yield trainer(augment(loaded(number)))


def data_loader(batches: int) -> Iterator[Tensor]:
    """Load in another process."""
    trainer = Trainer()
    for images in DataLoader(Images(batches), batch_size=None, num_workers=1):
        yield trainer(images)


def main() -> None:
    chosen = options(__doc__)
    torch.set_num_threads(1)
    few = chosen.quick
    runs = 25 if few else 100
    words = "milliseconds"
    parts = [
        "## Emulated devices\n\n"
        + table(
            ["graph", "one run", "bound", "predicted", "measured", "measured / bound"],
            emulated(runs),
        ),
        f"In {words} per run, {IN_FLIGHT} in flight, over {runs} runs. Target: 1.05.",
        "## A copy in, a task and a copy out of equal length\n\n"
        + table(["separate calls", "in flight", "times faster"], [separate(runs)]),
        f"In {words} per run. Target: 2.8; bound: 3.",
        "## Training steps\n\n"
        + table(
            ["", "called", "predicted", "in flight", "predicted", "times faster"],
            steps(5 if few else 20),
        ),
        f"In {words} per step. The next batch is copied while a step computes.",
        "## Submitting and waiting\n\n"
        + table(
            ["backend", "call", "submit and result", "more", "waking a thread, and back"],
            overhead(5 if few else 25),
        ),
        "In microseconds; the shortest of several rounds. Target: at most 30 more. On the host "
        "backend a call wakes no thread, and a submitted run wakes one, which wakes the caller.",
        "## A stream of tiny runs over two threads\n\n"
        + table(["", "microseconds"], stream(1000 if few else 10_000)),
        "## Loading on one core, training on another\n\n"
        + table(["", words, "times faster"], training(20 if few else 200, 1 if few else 5)),
    ]
    publish("in_flight", "Runs in flight", parts, chosen)


if __name__ == "__main__":
    main()
