"""The chapter "Automatic Parallelism" of Dive into Deep Learning: its experiments, and its exercises.

http://d2l.ai/chapter_computational-performance/auto-parallelism.html

Runs on the available GPUs. Without any, two are emulated on this CPU: each product and each copy
takes, on the wall clock, the seconds of a 4000x4000 one (20 TFLOP/s, PCIe 4), and computes with a
small matrix meanwhile.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import autosched as asc
from autosched.viz import gantt_svg, gantt_text

SIZE = 4000  # of the chapter's matrices
SMALL = 16  # of the matrices multiplied on emulated GPUs: torch uses one core for them
LIMIT = 1.1  # concurrent tasks may take so many times as long as the longest of them alone
REAL = min(torch.accelerator.device_count(), 2)  # on one real GPU, two logical devices

Trial = tuple[str, asc.Schedule, Mapping[str, Tensor]]


def machine(gpus: int = 2) -> asc.Machine:
    return asc.Machine.local(gpus=gpus) if REAL else asc.Machine.emulated(gpus=gpus, link="pcie4")


CPU, GPU1, GPU2 = machine().names


def matrix(device: str) -> Tensor:
    if not REAL:
        return torch.rand(SMALL, SMALL)
    return torch.rand(SIZE, SIZE, device=machine().device(device).physical or device)


def schedule(graph: asc.Graph, gpus: int = 2, to_cpu: Iterable[str] = ()) -> asc.Schedule:
    """Schedule with the costs of the chapter's matrices, and outputs in ``to_cpu`` on the CPU."""
    examples = dict.fromkeys(graph.input_names, torch.empty(SIZE, SIZE, device="meta"))
    return asc.schedule(graph, machine(gpus), examples=examples, outputs=dict.fromkeys(to_cpu, CPU))


def benchmark(quick: bool, *trials: Trial) -> list[float]:
    """Print and return the median seconds of schedules, run in turn so that noise affects all."""
    rounds = [
        [seconds(scheduled, inputs) for _, scheduled, inputs in trials]
        for _ in range(2 if quick else 6)
    ]
    medians = [
        statistics.median(taken) for taken in zip(*rounds[1:], strict=True)
    ]  # the first round warms up
    for (label, _, _), median in zip(trials, medians, strict=True):
        print(f"{label}: {median:.4f} sec")
    return medians


def seconds(scheduled: asc.Schedule, inputs: Mapping[str, Tensor]) -> float:
    start = time.perf_counter()
    scheduled(**inputs)
    for gpu in range(REAL):
        torch.accelerator.synchronize(gpu)
    return time.perf_counter() - start


def at_once(what: str, together: float, parts: Iterable[float]) -> bool:
    ratio = together / max(parts)
    verdict = "holds" if ratio <= LIMIT else "does NOT hold"
    print(
        f"    {what} take {ratio:.3f} times what the longer one takes alone; at most {LIMIT}: {verdict}"
    )
    return ratio <= LIMIT


def profile(
    scheduled: asc.Schedule, inputs: Mapping[str, Tensor], folder: Path | None
) -> asc.Timeline:
    """Return the timeline of the median of three runs; draw it, if a folder is given."""
    timeline = scheduled.profile(repeat=3, **inputs)
    name = scheduled.graph.name
    if folder:
        (folder / f"{name}.svg").write_text(
            gantt_svg(scheduled.simulate(), title=name, measured=timeline)
        )
    return timeline


def counted(items: Iterable[str]) -> str:
    return ", ".join(f"{count} {item}" for item, count in Counter(items).items())


def run(x: asc.Value, products: int) -> list[asc.Value]:
    return [x.mm(x) for _ in range(products)]


def computation_on_gpus(options: argparse.Namespace) -> bool:
    """Parallel computation on GPUs."""

    def trial(label: str, *gpus: str) -> Trial:
        graph = asc.Graph(label)
        for gpu in gpus:
            with graph.on(gpu):
                run(graph.input(f"x_{gpu}"), options.products)
        return label, schedule(graph), {f"x_{gpu}": matrix(gpu) for gpu in gpus}

    trials = trial("GPU1 time", GPU1), trial("GPU2 time", GPU2), trial("GPU1 & GPU2", GPU1, GPU2)
    *alone, both = benchmark(options.quick, *trials)
    if REAL == 1:
        print("    both are one real GPU, so together they take what both take")
        return True
    return at_once("two GPUs", both, alone) or options.quick


def computation_and_communication(options: argparse.Namespace) -> bool:
    """Parallel computation and communication."""
    graph, copies = asc.Graph("run_and_copy"), asc.Graph("copy")
    with graph.on(GPU1), copies.on(GPU1):
        graph.output(*run(graph.input("x"), options.products))
        copies.output(*copies.inputs(*graph.outputs))
    compute, both = schedule(graph), schedule(graph, to_cpu=graph.outputs)
    copy, x = schedule(copies, to_cpu=copies.outputs), {"x": matrix(GPU1)}
    trials = (
        ("Run on GPU1", compute, x),
        ("Copy to CPU", copy, compute(**x)),
        ("Run on GPU1 and copy to CPU", both, x),
    )
    *alone, together = benchmark(options.quick, *trials)
    profile(both, x, options.folder)
    return at_once("computing and copying", together, alone) or options.quick


def eight_tasks(options: argparse.Namespace) -> bool:
    """Exercise: eight independent tasks, on devices that autosched chooses."""
    graph, x = asc.Graph("eight_tasks"), {"x": matrix(CPU)}
    graph.output(*run(graph.input("x"), 8))
    one, two = schedule(graph, gpus=1), schedule(graph, gpus=2)
    before, after = benchmark(options.quick, ("1 GPU", one, x), ("2 GPUs", two, x))
    for chosen in (one, two):
        places = counted(f"on {device}" for device in chosen.placement.device.values())
        print(f"    {places}: {chosen.makespan:.4f} sec predicted")
    print(f"    speed-up {before / after:.2f}")
    return True


def small_tasks_on_the_cpu(options: argparse.Namespace) -> bool:
    """Exercise: tasks so small that torch uses one core for each; many run at once on the CPU."""
    streams, graph, x = (
        max(2, torch.get_num_threads()),
        asc.Graph("sorts"),
        {"x": torch.rand(10_000)},
    )
    numbers = graph.input("x")
    for _ in range(4 * options.products):
        graph.add(torch.msort, numbers)
    one, many = (
        asc.schedule(graph, asc.Machine.local(gpus=0, cpu_streams=n)) for n in (1, streams)
    )
    print(
        f"this computer has {os.cpu_count()} cores, {os.getloadavg()[0]:.1f} of them busy (load average)"
    )
    label = f"{len(graph)} sorts of 10,000 numbers on"
    before, after = benchmark(
        options.quick, (f"{label} 1 stream", one, x), (f"{label} {streams} streams", many, x)
    )
    print(f"    speed-up {before / after:.2f}")
    return True


def cpu_gpu_and_copies(options: argparse.Namespace) -> bool:
    """Exercise: CPU, GPU and copies at once; the CPU sums each product while the GPU makes the next."""
    graph, x = asc.Graph("cpu_gpu_and_copies"), {"x": matrix(GPU1)}
    with graph.on(GPU1):
        products = run(graph.input("x"), 8)
    with graph.on(CPU):
        graph.output(*(product.sum() for product in products))
    scheduled = schedule(graph)
    print(gantt_text(profile(scheduled, x, options.folder)))
    predicted = scheduled.simulate()
    print(
        f"    predicted: {predicted.makespan * 1e3:.1f} ms, {predicted.overlap().copies_hidden:.0%} hidden"
    )
    return True


def tangled_dependencies(options: argparse.Namespace) -> bool:
    """Exercise: writes in place, views, order and three devices, checked against the serial run."""
    graph, draw, numbers = (
        asc.Graph("tangled"),
        random.Random(0),
        torch.arange(64),
    )  # integers: the same bits everywhere
    x, values = graph.input("x"), []
    for i, device in enumerate(2 * machine().names):
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
                values.append(graph.add(torch.maximum, a, b, on=draw.choice(machine().names)))
    graph.output(*values)
    with asc.schedule(graph, machine(), outputs=CPU) as scheduled:
        runs = [scheduled(x=numbers) for _ in range(options.products)]
    print(
        "dependencies:",
        counted(dependency.kind for task in graph.tasks for dependency in task.dependencies),
    )
    print(
        "instructions:",
        counted(type(instruction).__name__.lower() for instruction in scheduled.program),
    )
    serial = graph.run_serial(x=numbers)
    equal = all(torch.equal(outputs[name], serial[name]) for outputs in runs for name in serial)
    print(
        f"    {len(runs)} runs: {'equal to serial, bit for bit' if equal else 'NOT equal to serial'}"
    )
    return equal


EXPERIMENTS = computation_on_gpus, computation_and_communication
EXERCISES = eight_tasks, small_tasks_on_the_cpu, cpu_gpu_and_copies, tangled_dependencies


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The chapter's experiments and exercises, with autosched."
    )
    parser.add_argument(
        "--quick", action="store_true", help="do less of everything, and do not judge times"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to draw what happened when (default: nowhere)"
    )
    options = parser.parse_args()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    options.products = 8 if options.quick else 50
    kind = ("two emulated GPUs", "two logical devices on one real GPU", "two real GPUs")[REAL]
    print(f"machine: {kind}\n{machine()}")
    held = []
    for section in EXPERIMENTS + EXERCISES:
        print(f"\n{section.__doc__}", flush=True)
        held.append(section(options))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
