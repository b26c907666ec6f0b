"""Run the commands demo, devices, simulate, verify, explain, compare and measure."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from autosched._lib.json_reader import json_data
from autosched._lib.text import amount, count, duration, table
from autosched.cli.loading import (
    costs_of,
    emulated_machine,
    examples_of,
    inputs_of,
    planned,
    read,
    subject_of,
)
from autosched.cli.output import CHECK_FAILED, UserCodeError, deliver, json_text, say, tracker
from autosched.cli.run import profiled
from autosched.comparison import compare as comparing
from autosched.errors import AutoschedError, ProgramError, ScheduleError, UsageError
from autosched.machine.machine import Machine
from autosched.scheduling.schedule import Schedule

__all__ = ["compare", "demo", "devices", "explain", "measure", "simulate", "summary", "verify"]


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from autosched.demo import main

    arguments.folder.mkdir(parents=True, exist_ok=True)
    return main(arguments.epochs, arguments.folder)


def devices(arguments: argparse.Namespace) -> int:
    """List torch's devices and the local machine."""
    found = _torch_devices()
    path = arguments.machine
    machine = read(path, Machine.from_json) if path else Machine.local(arguments.gpus)
    if arguments.write is not None:
        deliver(machine.to_json() + "\n", arguments.write)
    if arguments.json:
        shown = asdict(machine)
        for device in shown["devices"]:
            del device["imagined"]  # the machine contains it
        print(json_text({"here": found, "machine": shown}))
        return 0
    accelerators = found["accelerators"]
    threads = f"{found['threads']} CPU threads"
    print(f"torch {found['torch']}: {threads}, {len(accelerators)} accelerators")
    for device in accelerators:
        print(f"  {device['device']}: {device['name']}, {device['nbytes'] / 2**30:.0f} GiB")
    print(f"\n{path or 'Machine.local()'}:")
    print("\n".join(f"  {line}" for line in str(machine).splitlines()))
    if not path:
        print("  rates are rough defaults; `autosched measure` measures")
    return 0


def _torch_devices() -> dict[str, Any]:
    import torch

    found = []
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        for i in range(torch.accelerator.device_count()):
            item = getattr(torch, kind).get_device_properties(i)
            found.append({"device": f"{kind}:{i}", "name": item.name, "nbytes": item.total_memory})
    threads = torch.get_num_threads()
    return {"torch": torch.__version__, "threads": threads, "accelerators": found}


# ---- predictions


def simulate(arguments: argparse.Namespace) -> int:
    """Predict a schedule."""
    made = planned(arguments, subject_of(arguments))
    if not arguments.json:
        print(summary(made))
        return 0
    overlap = made.simulate().overlap()
    facts = {
        "graph": made.graph.name,
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "gap": made.gap,
        "serial_seconds": made.serial_seconds,
        "in_flight": made.program.in_flight,
        "period": made.period,
        "period_bound": made.period_bound,
        "copy_seconds": overlap.copy_seconds,
        "copies_hidden": overlap.copies_hidden if overlap.copy_seconds else None,
        "devices": _device_facts(made),
    }
    print(json_text(facts))
    return 0


def _device_facts(made: Schedule) -> dict[str, dict[str, Any]]:
    """Return by device its number of tasks, busy and idle time, and peak memory."""
    timeline = made.simulate()
    tasks = Counter(made.placement.device.values())
    return {
        name: {
            "tasks": tasks[name],
            "busy_seconds": (busy := timeline.computing(name)),
            "idle_seconds": timeline.makespan - busy,
            "peak_bytes": made.peak_bytes[name],
        }
        for name in made.machine.names
    }


def summary(made: Schedule) -> str:
    """Return the prediction in a few lines."""
    overlap = made.simulate().overlap()
    copies = "-", "there are none"
    if overlap.copy_seconds:
        copies = f"{overlap.copies_hidden:.0%}", "of their time, behind compute"
    bound = f"no schedule can be faster; the gap is {made.gap:.0%}"
    serial = "the same tasks and copies, one at a time"
    facts = [
        ("makespan", duration(made.makespan), "predicted"),
        ("lower bound", duration(made.lower_bound), bound),
        *_period(made),
        ("serial", duration(made.serial_seconds), serial),
        ("copies hidden", *copies),
    ]
    instructions = count(len(made.program), "instruction")
    lines = [f"{made.graph.name}: {count(len(made.graph), 'task')}, {instructions}"]
    lines += [f"  {label:<14}{value:>10}  {note}" for label, value, note in facts]
    rows = [
        (
            name,
            str(found["tasks"]),
            duration(found["busy_seconds"]),
            duration(found["idle_seconds"]),
            amount(found["peak_bytes"], "B"),
        )
        for name, found in _device_facts(made).items()
    ]
    heads = "device", "tasks", "busy", "idle", "peak memory"
    return "\n".join([*lines, "", *table(heads, rows)])


def _period(made: Schedule) -> list[tuple[str, str, str]]:
    count = made.program.in_flight
    bound = f"seconds per run with {count} in flight; at least {duration(made.period_bound)}"
    return [("period", duration(made.period), bound)] if count > 1 else []


def verify(arguments: argparse.Namespace) -> int:
    """Check a schedule for races."""
    try:
        made = planned(arguments, subject_of(arguments))
        made.verify()
    except (ProgramError, ScheduleError) as error:
        fault = error if isinstance(error, ProgramError) else error.__cause__
        if not isinstance(fault, ProgramError):
            raise
        if arguments.json:
            print(json_text({"proved": False, "fault": str(fault)}))
        say(f"{arguments.thing} is not proved: {fault}")
        return CHECK_FAILED
    instructions = len(made.program)
    streams = len(made.program.streams)
    if arguments.json:
        print(json_text({"proved": True, "instructions": instructions, "streams": streams}))
    else:
        where = count(streams, "stream")
        print(f"proved: {count(instructions, 'instruction')} on {where} cannot race")
    return 0


def explain(arguments: argparse.Namespace) -> int:
    """Explain the makespan of a schedule and suggest improvements."""
    subject = subject_of(arguments)
    with planned(arguments, subject) as made:
        measured = None
        if arguments.profile:
            measured = profiled(made, inputs_of(subject), arguments.repeat)
        explanation = made.explain(arguments.task, measured)
    print(json_text(json_data(explanation)) if arguments.json else explanation)
    return 0


# ---- comparison


def compare(arguments: argparse.Namespace) -> int:
    """Plan a graph for many machines by many policies."""
    form = arguments.format or _format(arguments.output)
    subject = subject_of(arguments)
    costs = costs_of(arguments, subject)
    made = comparing.compare(
        subject.graph,
        _machines(arguments),
        arguments.policies,
        seconds=arguments.seconds,
        seed=arguments.seed,
        costs=costs,
        examples=examples_of(subject, costs),
        in_flight=arguments.in_flight,
        objective=arguments.objective or "makespan",
        track=tracker("comparing"),
    )
    deliver({"text": made.__str__, "json": made.to_json, "svg": made.svg}[form](), arguments.output)
    if not made.rows:
        raise UsageError("no machine can run this; the reasons are printed above")
    return 0


def _format(output: Path | None) -> str:
    suffix = output.suffix.lower() if output else ".txt"
    form = {".txt": "text", ".json": "json", ".svg": "svg"}.get(suffix)
    if form is None:
        known = ".txt, .json and .svg, or --format"
        raise UsageError(f"{output}: no format has this suffix; known are {known}")
    return form


def _machines(arguments: argparse.Namespace) -> dict[str, Machine] | list[Machine]:
    files = {path.stem: read(path, Machine.from_json) for path in arguments.machines or ()}
    options = arguments.gpus, arguments.links, arguments.hosts, arguments.network
    if files and all(option is None for option in options):
        return files
    cluster = arguments.hosts is not None or arguments.network is not None
    gpus = arguments.gpus or ([1] if cluster else [1, 2, 4, 8])
    hosts = arguments.hosts or [None]
    kinds = product(hosts, gpus, arguments.links or ["pcie4"])
    network = arguments.network
    made = [emulated_machine(count, link, number, network) for number, count, link in kinds]
    return [*made, *files.values()]


# ---- measurement


def measure(arguments: argparse.Namespace) -> int:
    """Measure costs of tasks and rates of links, as JSON that other commands accept."""
    from autosched.measurement import measure_costs, measure_machine

    subject = subject_of(arguments)
    inputs = inputs_of(subject)
    machine = Machine.local(gpus=arguments.gpus)
    cache = arguments.cache
    options = {"repeat": arguments.repeat, "replay": arguments.replay, "cache": cache}
    try:
        costs = measure_costs(subject.graph, machine, inputs, **options, track=tracker("measuring"))
    except AutoschedError:
        raise
    except Exception as error:
        raise UserCodeError("a task failed while it was measured") from error
    deliver(costs.to_json() + "\n", arguments.output)
    if arguments.links is not None:
        measured = measure_machine(machine, cache=cache, track=tracker("copying"))
        deliver(measured.to_json() + "\n", arguments.links)
    return 0
