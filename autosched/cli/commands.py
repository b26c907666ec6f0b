"""Run the commands: demo, devices, show, run, explain, compare and measure."""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, Literal

from autosched._lib.json_reader import json_data
from autosched._lib.text import amount, count, duration, table
from autosched._lib.tree import transform
from autosched.cli import loading, output
from autosched.cli.loading import inputs_of, planned, subject_of
from autosched.cli.output import CHECK_FAILED, UserCodeError, deliver, json_text, say, tracker
from autosched.comparison import compare as comparing
from autosched.errors import AutoschedError, TaskError, UsageError
from autosched.explanation import Case
from autosched.explanation.advice import reloads
from autosched.machine.machine import Machine
from autosched.scheduling.schedule import Schedule
from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg, gantt_text, graph_dot, graph_svg, perfetto_json, picture
from autosched.viz.charts import histories
from autosched.viz.drawing import phases

_REPEAT = 9  # runs that are measured


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from autosched.demo import main

    arguments.folder.mkdir(parents=True, exist_ok=True)
    return main(arguments.epochs, arguments.folder)


def devices(arguments: argparse.Namespace) -> int:
    """List torch's devices and the local machine."""
    found = _torch_devices()
    path = arguments.machine
    machine = loading.read(path, Machine.from_json) if path else Machine.local(arguments.gpus)
    if arguments.write is not None:
        deliver(machine.to_json() + "\n", arguments.write)
    if arguments.json:
        print(json_text({"here": found, "machine": json_data(machine)}))
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
    for i in range(torch.accelerator.device_count()):
        kind = str(torch.accelerator.current_accelerator())
        item = getattr(torch, kind).get_device_properties(i)
        found.append({"device": f"{kind}:{i}", "name": item.name, "nbytes": item.total_memory})
    threads = torch.get_num_threads()
    return {"torch": torch.__version__, "threads": threads, "accelerators": found}


# ---- predictions


def facts(made: Schedule) -> str:
    """Return what is predicted as JSON."""
    names = "makespan lower_bound gap serial_seconds period period_bound".split()
    found = {
        "graph": made.graph.name,
        "instructions": len(made.program),
        "streams": len(made.program.streams),
        **{name: getattr(made, name) for name in names},
        "in_flight": made.program.in_flight,
        **_copies(made.simulate()),
        "devices": _device_facts(made),
    }
    return json_text(found)


def _copies(timeline: Timeline) -> dict[str, float | None]:
    overlap = timeline.overlap()
    hidden = overlap.copies_hidden if overlap.copy_seconds else None
    return {"copy_seconds": overlap.copy_seconds, "copies_hidden": hidden}


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
    hidden = _copies(made.simulate())["copies_hidden"]
    copies = "there are none" if hidden is None else "of their time, behind compute"
    bound = f"no schedule can be faster; the gap is {made.gap:.0%}"
    serial = "the same tasks and copies, one at a time"
    facts = [
        ("makespan", duration(made.makespan), "predicted"),
        ("lower bound", duration(made.lower_bound), bound),
        ("serial", duration(made.serial_seconds), serial),
        ("copies hidden", _share(hidden), copies),
    ]
    if (several := made.program.in_flight) > 1:
        least = f"seconds per run with {several} in flight; at least {duration(made.period_bound)}"
        facts.insert(2, ("period", duration(made.period), least))
    instructions = count(len(made.program), "instruction")
    where = count(len(made.program.streams), "stream")
    what = f"{count(len(made.graph), 'task')}, {instructions} on {where}"
    lines = [f"{made.graph.name}: {what}; proved: they cannot race"]
    lines += [f"  {label:<14}{value:>10}  {note}" for label, value, note in facts]
    rows = []
    for name, found in _device_facts(made).items():
        times = duration(found["busy_seconds"]), duration(found["idle_seconds"])
        rows.append((name, str(found["tasks"]), *times, amount(found["peak_bytes"], "B")))
    heads = "device", "tasks", "busy", "idle", "peak memory"
    return "\n".join([*lines, "", *table(heads, rows)])


def explain(arguments: argparse.Namespace) -> int:
    """Explain the makespan of a schedule and suggest improvements."""
    subject = subject_of(arguments)
    with planned(arguments, subject) as made:
        measured = None
        if arguments.profile:
            measured = profiled(made, inputs_of(subject), arguments.repeat or _REPEAT)
        explanation = made.explain(arguments.task, measured)
    print(json_text(json_data(explanation)) if arguments.json else explanation)
    return 0


# ---- comparison


def compare(arguments: argparse.Namespace) -> int:
    """Plan a graph for many machines by many policies."""
    form = _format(arguments, {".txt": "text", ".json": "json", ".svg": "svg"})
    subject = subject_of(arguments)
    costs = loading.costs_of(arguments, subject)
    machines = _machines(arguments)
    if limits := arguments.memory:
        several = [*machines.values()] if isinstance(machines, dict) else machines
        machines = [machine.limited(nbytes) for machine in several for nbytes in limits]
    made = comparing.compare(
        subject.graph,
        machines,
        arguments.policies,
        seconds=arguments.seconds,
        seed=arguments.seed,
        costs=costs,
        examples=loading.examples_of(subject, costs),
        in_flight=arguments.in_flight,
        objective=arguments.objective or "makespan",
        track=tracker("comparing"),
    )
    deliver({"text": made.__str__, "json": made.to_json, "svg": made.svg}[form](), arguments.output)
    if not made.rows:
        raise UsageError("no machine can run this; the reasons are printed above")
    return 0


def _machines(arguments: argparse.Namespace) -> dict[str, Machine] | list[Machine]:
    files = {path.stem: loading.read(path, Machine.from_json) for path in arguments.machines or ()}
    options = arguments.gpus, arguments.links, arguments.hosts, arguments.network
    if files and all(option is None for option in options):
        return files
    cluster = arguments.hosts is not None or arguments.network is not None
    gpus = arguments.gpus or ([1] if cluster else [1, 2, 4, 8])
    hosts = arguments.hosts or [None]
    kinds = product(hosts, gpus, arguments.links or ["pcie4"])
    network = arguments.network
    made = [loading.emulated_machine(count, link, number, network) for number, count, link in kinds]
    return [*made, *files.values()]


# ---- measurement


def measure(arguments: argparse.Namespace) -> int:
    """Measure costs of tasks and rates of links, as JSON that other commands accept."""
    from autosched.measurement import measure_costs, measure_machine

    subject = subject_of(arguments)
    inputs = inputs_of(subject)
    machine = Machine.local(gpus=arguments.gpus)
    options = {"repeat": arguments.repeat or 5, "replay": arguments.replay}
    try:
        costs = measure_costs(subject.graph, machine, inputs, **options, track=tracker("measuring"))
    except AutoschedError:
        raise
    except Exception as error:
        raise UserCodeError("a task failed while it was measured") from error
    deliver(costs.to_json() + "\n", arguments.output)
    if arguments.links is not None:
        measured = measure_machine(machine, track=tracker("copying"))
        deliver(measured.to_json() + "\n", arguments.links)
    return 0


# ---- show

Draw = Callable[[Schedule], str | bytes]


def show(arguments: argparse.Namespace) -> int:
    """Print or draw a schedule."""
    form, view = _choice(arguments)
    made = planned(arguments, subject_of(arguments))
    if form == "text" and view == "gantt" and arguments.output is None:
        deliver(_text(made, output.has_colours()), None)
    else:
        deliver(FORMATS[form][view](made), arguments.output)
    return 0


def _choice(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the format and the view. Raises UsageError if they do not go together."""
    form = _format(arguments, _SUFFIXES)
    view = arguments.what or next(iter(FORMATS[form]))
    if view not in FORMATS[form]:
        able = ", ".join(name for name, views in FORMATS.items() if view in views)
        raise UsageError(f"--what {view} cannot be shown as {form}; it can as {able}")
    return form, view


def _format(arguments: argparse.Namespace, suffixes: Mapping[str, str]) -> str:
    """Return the format that an option names, or else the suffix of the output."""
    if arguments.json:
        return "json"
    suffix = arguments.output.suffix.lower() if arguments.output else ".txt"
    if arguments.format is None and suffix not in suffixes:
        known = f"{', '.join(suffixes)}, or give --format"
        raise UsageError(f"{arguments.output}: no format has this suffix; known are {known}")
    return arguments.format or suffixes[suffix]


def _timeline(made: Schedule) -> Timeline:
    return made.simulate(made.runs_shown)


def _text(made: Schedule, colour: bool = False) -> str:
    chart = gantt_text(_timeline(made), output.width(), colour=colour)
    return f"{made}\n\n{chart}\n\n{summary(made)}"


def _gantt(made: Schedule) -> str:
    return gantt_svg(_timeline(made), title=made.graph.name, phases=phases(made.graph))


def _graph(draw: Callable[..., str], made: Schedule) -> str:
    return draw(made.graph, made.placement.device, title=made.graph.name)


def _trace(made: Schedule) -> str:
    graph = made.graph
    return perfetto_json(_timeline(made), graph=graph, memory=made.memory(), title=graph.name)


def _memory(made: Schedule) -> str:
    """Draw the memory of devices over time, with what is recomputed and what is reloaded."""
    steps = {name: found for name, found in made.memory().items() if any(n for _, n in found)}
    again = {*made.recomputed}
    back = {id(copy) for copy in reloads(Case(made.problem, made.placement, made.program))}
    marks: dict[str, list[tuple[float, float]]] = {}
    for span in _timeline(made).spans:
        instruction: Any = made.program.instructions[span.instruction]
        is_back = id(instruction) in back
        if is_back or (span.kind == "run" and span.name in again):
            device = instruction.destination if is_back else span.streams[0].device
            held = [nbytes for second, nbytes in steps.get(device, ()) if second <= span.start]
            kind = "reloaded" if is_back else "recomputed"
            marks.setdefault(kind, []).append((span.start, held[-1] if held else 0.0))
    sizes = {device.name: device.nbytes for device in made.machine.devices}
    limits = {name: sizes[name] for name in steps if sizes[name] < float("inf")}
    return histories(steps, limits, marks, title=made.graph.name, unit="B")


_PICTURES: Mapping[str, Callable[[Schedule], str]] = {
    "gantt": _gantt,
    "memory": _memory,
    "graph": partial(_graph, graph_svg),
}


def _picture(view: str, kind: Literal["png", "pdf"], made: Schedule) -> bytes:
    return picture(_PICTURES[view](made), kind)


# By format, the views that it supports; the first is the default of --what.
FORMATS: Mapping[str, Mapping[str, Draw]] = {
    "text": {"gantt": _text, "summary": summary, "graph": lambda made: str(made.graph)},
    "json": {"summary": facts},
    "svg": _PICTURES,
    "png": {view: partial(_picture, view, "png") for view in _PICTURES},
    "pdf": {view: partial(_picture, view, "pdf") for view in _PICTURES},
    "html": {"page": lambda made: made.page()},
    "dot": {"graph": partial(_graph, graph_dot)},
    "perfetto": {"trace": _trace},
    "code": {"code": lambda made: made.code},
}
_SUFFIXES = {
    ".txt": "text",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".html": "html",
    ".dot": "dot",
    ".json": "perfetto",
    ".py": "code",
}


# ---- run

_PROFILES = (".json", ".html", ".svg")  # of files with a profile


def run(arguments: argparse.Namespace) -> int:
    """Run a schedule, compare it with the serial run, and profile it."""
    path = arguments.save
    if path is not None and path.suffix not in _PROFILES:
        raise UsageError(f"{path}: a profile is written as {', '.join(_PROFILES)}")
    subject = subject_of(arguments)
    inputs = inputs_of(subject)
    with planned(arguments, subject) as made:
        try:
            unequal = _difference(made, inputs, arguments.seed)
        except TaskError as error:
            raise UserCodeError(str(error)) from error.__cause__
        except AutoschedError:
            raise
        except Exception as error:
            raise UserCodeError(f"{arguments.thing} cannot be run serially") from error
        measured = None
        if arguments.profile or path is not None:
            measured = profiled(made, inputs, arguments.repeat or _REPEAT)
        if measured is not None and path is not None:
            deliver(_profile(made, measured, path.suffix), path)
        times = {}
        if measured is not None:
            predicted = _times(made, made.simulate())
            times = {"predicted": predicted, "measured": _times(made, measured)}
        if arguments.json:
            print(json_text({"equal": unequal is None, **times}))
        else:
            kind = "emulated machine" if made.machine.imagined else "this machine"
            how = "equal" if unequal is None else "NOT equal"
            print(f"ran {made.graph.name} on {', '.join(made.machine.names)} ({kind}): ", end="")
            print(f"{how} to the serial run, bit for bit")
            if times:
                print("\n" + "\n".join(_table(**times)))
    if unequal is not None:
        say(f"not equal to the serial run: {unequal}")
    return 0 if unequal is None else CHECK_FAILED


def profiled(made: Schedule, inputs: Mapping[str, Any], repeat: int) -> Timeline:
    """Return the median of some measured runs with fresh inputs, without the first."""
    numbers = tracker("profiling")(range(repeat + 1))
    runs = [made.profile(**_copied(made, inputs)) for _ in numbers]
    return Timeline.median(runs[1:])


def _difference(made: Schedule, inputs: Mapping[str, Any], seed: int) -> str | None:
    """Return how outputs and inputs of a serial run and of one by schedule differ, or None."""
    import torch

    from autosched.testing.comparing import difference

    results = []
    for call in (made.run_serial, made):
        own = _copied(made, inputs)
        torch.manual_seed(seed)
        results.append((call(**own), own))
    return difference(*results)


def _copied(made: Schedule, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of inputs on the devices of the schedule, with the same sharing of memory."""
    own = copy.deepcopy(dict(inputs))
    if made.machine.imagined:
        return own
    for name, device in made.program.inputs:
        where = made.machine.device(device).physical or device

        def moved(leaf: Any, where: str = where) -> Any:
            return leaf.to(where) if hasattr(leaf, "to") else leaf

        if name in own:
            own[name] = transform(moved, own[name])
    return own


def _profile(made: Schedule, measured: Timeline, suffix: str) -> str:
    """Return a profile beside the prediction as a trace, a page or a picture."""
    title = made.graph.name
    if suffix == ".json":
        return perfetto_json(made.simulate(), measured=measured, graph=made.graph, title=title)
    if suffix == ".html":
        return made.page(measured)
    return gantt_svg(made.simulate(), measured=measured, title=title, phases=phases(made.graph))


# ---- text


def _times(made: Schedule, timeline: Timeline) -> dict[str, Any]:
    busy = {name: timeline.computing(name) for name in made.machine.names}
    return {"makespan": timeline.makespan, **_copies(timeline), "busy_seconds": busy}


def _share(item: float | None) -> str:
    return "-" if item is None else f"{item:.0%}"


def _table(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    both = predicted, measured
    rows = [
        ("makespan", *(duration(times["makespan"]) for times in both)),
        ("copies hidden", *(_share(times["copies_hidden"]) for times in both)),
    ]
    for name in predicted["busy_seconds"]:
        rows.append((f"{name} busy", *(duration(times["busy_seconds"][name]) for times in both)))
    return table(("", "predicted", "measured"), rows)
