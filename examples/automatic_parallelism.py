"""The chapter "Automatic Parallelism" of Dive into Deep Learning: its experiments, and its exercises.

http://d2l.ai/chapter_computational-performance/auto-parallelism.html

Runs on the GPUs that are there. Where there are none, this CPU plays two: each product and each copy takes, on the
wall clock, the seconds that a 4000x4000 one would (20 TFLOP/s, PCIe 4), and really works on a small matrix meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autosched as asc
from autosched.viz import gantt_svg, gantt_text

SIZE = 4000  # of the chapter's matrices
SMALL = 32  # of those that are multiplied where GPUs are played
LIMIT = 1.1  # things done at once may take so many times what the longest of them takes

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Lab:
    """Where the experiments run, and how much of them."""

    gpus: int  # how many real ones there are; with one, it is two logical devices
    quick: bool
    folder: Path | None

    def machine(self, gpus: int = 2) -> asc.Machine:
        return asc.Machine.local(gpus=gpus) if self.gpus else asc.Machine.emulated(gpus=gpus, link="pcie4")

    @property
    def gpu_names(self) -> list[str]:
        return [device.name for device in self.machine().devices if device.kind != "cpu"]

    def matrix(self, device: str = "cpu") -> Tensor:
        if not self.gpus:
            return torch.rand(SMALL, SMALL)
        return torch.rand(SIZE, SIZE, device=self.machine().device(device).physical or device)

    def schedule(self, graph: asc.Graph, gpus: int = 2, to_cpu: Iterable[str] = ()) -> asc.Schedule:
        """Schedule with the costs of the chapter's matrices; outputs named in ``to_cpu`` are wanted on the CPU."""
        examples = dict.fromkeys(graph.input_names, torch.empty(SIZE, SIZE, device="meta"))
        return asc.schedule(graph, self.machine(gpus), examples=examples, outputs=dict.fromkeys(to_cpu, "cpu"))

    def benchmark(self, calls: Calls) -> list[float]:
        """Print and return the median seconds of calls, made in turn so that a busy computer slows them alike."""
        rounds = [[self.seconds(call) for call in calls.values()] for _ in range(2 if self.quick else 6)]
        medians = [statistics.median(seconds) for seconds in zip(*rounds[1:], strict=True)]  # the first warms up
        for label, seconds in zip(calls, medians, strict=True):
            print(f"{label}: {seconds:.4f} sec")
        return medians

    def seconds(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        for gpu in range(self.gpus):
            torch.accelerator.synchronize(gpu)
        return time.perf_counter() - start

    def is_parallel(self, what: str, together: float, parts: Iterable[float]) -> bool:
        ratio = together / max(parts)
        verdict = "holds" if ratio <= LIMIT else "does NOT hold"
        print(f"    {what}: {ratio:.3f} times the longest of them alone; at most {LIMIT}: {verdict}")
        return ratio <= LIMIT or self.quick

    def draw(self, schedule: asc.Schedule, **inputs: Tensor) -> asc.Timeline:
        """Run and return what happened when; draw it, where a folder was given."""
        timeline = schedule.profile(**inputs)
        if self.folder:
            path = self.folder / f"{schedule.graph.name}.svg"
            path.write_text(gantt_svg(schedule.simulate(), title=schedule.graph.name, measured=timeline))
        return timeline


def run(x: asc.Value, products: int) -> list[asc.Value]:
    return [x.mm(x) for _ in range(products)]


def computation_on_gpus(lab: Lab) -> bool:
    """Parallel computation on GPUs."""

    def on(*gpus: str) -> Callable[[], Any]:
        graph = asc.Graph("products")
        for gpu in gpus:
            with graph.on(gpu):
                run(graph.input(f"x_{gpu}"), 8 if lab.quick else 50)
        schedule, inputs = lab.schedule(graph), {f"x_{gpu}": lab.matrix(gpu) for gpu in gpus}
        return lambda: schedule(**inputs)

    gpu1, gpu2 = lab.gpu_names
    *parts, both = lab.benchmark({"GPU1 time": on(gpu1), "GPU2 time": on(gpu2), "GPU1 & GPU2": on(gpu1, gpu2)})
    if lab.gpus == 1:
        print("    both are one real GPU, so together they take what both take")
        return True
    return lab.is_parallel("two GPUs at once", both, parts)


def computation_and_communication(lab: Lab) -> bool:
    """Parallel computation and communication."""
    graph, copies = asc.Graph("run_and_copy"), asc.Graph("copies")
    with graph.on(lab.gpu_names[0]):
        graph.output(*run(graph.input("x"), 8 if lab.quick else 50))
    with copies.on(lab.gpu_names[0]):
        copies.output(*copies.inputs(*graph.outputs))
    compute, both = lab.schedule(graph), lab.schedule(graph, to_cpu=graph.outputs)
    copy = lab.schedule(copies, to_cpu=copies.outputs)
    x = lab.matrix(lab.gpu_names[0])
    y = compute(x=x)
    calls: Calls = {"Run on GPU1": lambda: compute(x=x), "Copy to CPU": lambda: copy(**y)}
    *parts, together = lab.benchmark(calls | {"Run on GPU1 and copy to CPU": lambda: both(x=x)})
    lab.draw(both, x=x)
    return lab.is_parallel("computing and copying at once", together, parts)


def eight_tasks(lab: Lab) -> bool:
    """Exercise: eight independent tasks, on devices that autosched chooses."""
    graph, x = asc.Graph("eight_tasks"), lab.matrix()
    graph.output(*run(graph.input("x"), 8))
    one, two = lab.schedule(graph, gpus=1), lab.schedule(graph, gpus=2)
    before, after = lab.benchmark({"1 GPU": lambda: one(x=x), "2 GPUs": lambda: two(x=x)})
    for schedule in (one, two):
        places = ", ".join(f"{count} on {name}" for name, count in Counter(schedule.placement.device.values()).items())
        print(f"    {places}: {schedule.makespan:.4f} sec predicted")
    print(f"    speed-up {before / after:.2f}")
    return True


def small_tasks_on_the_cpu(lab: Lab) -> bool:
    """Exercise: tasks so small that torch gives each to one core; on the CPU alone they pay side by side."""
    streams = torch.get_num_threads()
    print(f"this computer has {os.cpu_count()} cores; torch uses {streams}")
    for label, task, x, count in (
        ("sorts of 10,000 numbers", torch.msort, torch.rand(10_000), 64),
        ("products of 768x768, which torch shares out itself", lambda x: x.mm(x), torch.rand(768, 768), 4),
    ):
        graph = asc.Graph(label)
        value = graph.input("x")
        for _ in range(count):
            task(value)
        one, many = (asc.schedule(graph, asc.Machine.local(gpus=0, cpu_streams=n)) for n in (1, streams))
        before, after = lab.benchmark(
            {f"{count} {label}, 1 stream": lambda: one(x=x), f"{streams} streams": lambda: many(x=x)}
        )
        print(f"    speed-up {before / after:.2f}")
    return True


def cpu_gpu_and_copies(lab: Lab) -> bool:
    """Exercise: CPU, GPU and copies at once. The CPU sums each product while the GPU makes the next."""
    graph, x = asc.Graph("cpu_gpu_and_copies"), lab.matrix(lab.gpu_names[0])
    with graph.on(lab.gpu_names[0]):
        products = run(graph.input("x"), 8)
    with graph.on("cpu"):
        graph.output(*(product.sum() for product in products))
    schedule = lab.schedule(graph)
    schedule(x=x)
    timeline = lab.draw(schedule, x=x)
    print(gantt_text(timeline))
    hidden, expected = timeline.overlap().copies_hidden, schedule.simulate().overlap().copies_hidden
    print(f"    {hidden:.0%} of the copies' time is hidden behind compute; predicted {expected:.0%}")
    return True


def tangled_dependencies(lab: Lab) -> bool:
    """Exercise: writes in place, views, order and several devices, checked against the serial run.

    The numbers are whole, so that every device computes the same bits.
    """
    graph, draw = asc.Graph("tangled"), random.Random(0)
    devices, x, values = ("cpu", *lab.gpu_names), graph.input("x"), []
    for i, device in enumerate(devices * 2):
        with graph.on(device):
            values.append(x + i)
    for _ in range(100):
        a, b = draw.sample(values, 2)
        match draw.randrange(4):
            case 0:
                a += b
            case 1:
                a[1:] -= b[:-1]
            case 2:
                graph.add(Tensor.mul_, a, 3, writes=[a], outputs=(), after=draw.choice(graph.tasks))
            case 3:
                values.append(graph.add(torch.maximum, a, b, on=draw.choice(devices)))
    graph.output(*values)
    numbers = torch.arange(64)
    serial = graph.run_serial(x=numbers)
    with lab.schedule(graph, to_cpu=graph.outputs) as schedule:
        runs = [schedule(x=numbers) for _ in range(3 if lab.quick else 50)]
    kinds = Counter(dependency.kind for task in graph.tasks for dependency in task.dependencies)
    print(f"{len(graph)} tasks, {len(schedule.program.streams)} streams; dependencies:", dict(kinds))
    equal = all(torch.equal(outputs[name], serial[name]) for outputs in runs for name in serial)
    print(f"    {len(runs)} runs {'equal to serial: bit for bit' if equal else 'NOT equal to serial'}")
    return equal


SECTIONS = (
    computation_on_gpus,
    computation_and_communication,
    eight_tasks,
    small_tasks_on_the_cpu,
    cpu_gpu_and_copies,
    tangled_dependencies,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="do less of everything, and do not judge times")
    parser.add_argument("--folder", type=Path, help="where to draw what happened when (default: nowhere)")
    arguments = parser.parse_args()
    gpus = min(torch.accelerator.device_count(), 2)
    lab = Lab(gpus, arguments.quick, arguments.folder)
    kind = ("two emulated GPUs", "two logical devices on one real GPU", "two real GPUs")[gpus]
    print(f"{kind}\n{lab.machine()}")
    held = []
    for section in SECTIONS:
        print(f"\n{(section.__doc__ or '').splitlines()[0]}")
        held.append(section(lab))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
