"""Run the commands: demo, devices, show, run, explain, compare, measure and sanitize."""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from autosched._lib.json_reader import json_data
from autosched._lib.text import amount, count, duration, table
from autosched._lib.tree import transform
from autosched.cli import output
from autosched.cli.output import CHECK_FAILED, UserCodeError, deliver, json_text, say, tracker
from autosched.comparison import compare as compared
from autosched.costs.costs import Costs
from autosched.errors import AutoschedError, TaskError, UsageError, listed, shown
from autosched.explanation import Case
from autosched.explanation.advice import reloads
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.scheduling.planning import schedule
from autosched.scheduling.schedule import Schedule, load
from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg, gantt_text, graph_dot, graph_svg, perfetto_json, picture
from autosched.viz.charts import histories
from autosched.viz.drawing import phases

T = TypeVar("T")
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
    machine = read(path, Machine.from_json) if path else Machine.local(arguments.gpus)
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
    costs = costs_of(arguments, subject)
    machines = _machines(arguments)
    if limits := arguments.memory:
        several = [*machines.values()] if isinstance(machines, dict) else machines
        machines = [machine.limited(nbytes) for machine in several for nbytes in limits]
    made = compared(
        subject.graph,
        machines,
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


# ---- races in the user's own stream code


def sanitize(arguments: argparse.Namespace) -> int:
    """Run a script or function on simulated GPUs, and print what is found."""
    from autosched.sanitizer import watching

    is_script = arguments.script.endswith(".py")
    if is_script and not Path(arguments.script).is_file():
        raise UsageError(f"{arguments.script}: no such file")
    if not is_script and arguments.arguments:
        raise UsageError(f"{arguments.script} is a function, which is called without arguments")
    with watching(arguments.gpus or 1, arguments.numbers) as watched:
        if is_script:
            _run_script(arguments.script, arguments.arguments)
        else:
            returned(arguments.script)
    report = watched.report
    print(json_text(report.to_json()) if arguments.json else report)
    return CHECK_FAILED if report.findings else 0


def _run_script(script: str, arguments: list[str]) -> None:
    """Run a script as Python does, with its arguments; what it prints goes to stderr."""
    before, path, output = sys.argv, list(sys.path), sys.stdout
    sys.argv, sys.stdout = [script, *arguments], sys.stderr
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise UserCodeError(f"{script} exits with {exit_.code}") from exit_
    except Exception as error:
        raise UserCodeError(f"{script} failed") from error
    finally:
        sys.argv, sys.path[:], sys.stdout = before, path, output


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
        if arguments.format not in (None, "json"):
            raise UsageError("--json and --format name different formats; give one of them")
        return "json"
    suffix = arguments.output.suffix.lower() if arguments.output else ".txt"
    if arguments.format is None and suffix not in suffixes:
        known = f"{', '.join(suffixes)}, or give --format"
        raise UsageError(f"{arguments.output}: no format has this suffix; known are {known}")
    return arguments.format or suffixes[suffix]


def _timeline(made: Schedule, measured: Timeline | None = None) -> Timeline:
    return made.simulate(made.runs_shown if measured is None else measured.run_count)


def _text(made: Schedule, colour: bool = False) -> str:
    chart = gantt_text(_timeline(made), output.width(), colour=colour)
    return f"{made}\n\n{chart}\n\n{summary(made)}"


def _gantt(made: Schedule, measured: Timeline | None = None) -> str:
    look: dict[str, Any] = {"title": made.graph.name, "phases": phases(made.graph)}
    return gantt_svg(_timeline(made, measured), measured=measured, **look)


def _graph(draw: Callable[..., str], made: Schedule) -> str:
    return draw(made.graph, made.placement.device, title=made.graph.name)


def _trace(made: Schedule, measured: Timeline | None = None) -> str:
    graph = made.graph
    memory = made.memory() if measured is None else None
    what: dict[str, Any] = {"graph": graph, "memory": memory, "title": graph.name}
    return perfetto_json(_timeline(made, measured), measured=measured, **what)


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
_SUFFIXES = {f".{form}": form for form in ("svg", "png", "pdf", "html", "dot")}
_SUFFIXES |= {".txt": "text", ".json": "perfetto", ".py": "code"}


# ---- run

# By suffix, what is written of a profile.
_PROFILES: Mapping[str, Callable[[Schedule, Timeline], str]] = {
    ".json": _trace,
    ".html": Schedule.page,
    ".svg": _gantt,
}


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
            deliver(_PROFILES[path.suffix](made, measured), path)
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


# ---- what commands work on: a graph or a saved schedule, its machine and its costs


@dataclass(frozen=True)
class Subject:
    """A graph, with optional inputs, machine and schedule; ``name`` is what the user typed."""

    name: str
    graph: Graph
    inputs: Mapping[str, Any] | None = None
    machine: Machine | None = None
    schedule: Schedule | None = None


def subject_of(arguments: argparse.Namespace) -> Subject:
    """Load the subject of a command. Raises UsageError if it is missing or invalid."""
    name = arguments.thing
    builder = arguments.graph
    if Path(name).is_file() and not name.endswith(".py"):
        if builder is None:
            how = "give the function that builds its graph, --graph module:function"
            raise UsageError(f"{name}: a saved schedule holds no functions; {how}")
        built = _built(builder)
        made = load(name, built.graph)
        return Subject(name, made.graph, built.inputs, made.machine, made)
    if builder is not None:
        raise UsageError(f"--graph goes with a saved schedule, and {name!r} is no file")
    return _built(name)


def planned(arguments: argparse.Namespace, subject: Subject) -> Schedule:
    """Return the schedule of a subject: the saved one, unless an option requests another."""
    plan = "policy", "seconds", "costs", "in_flight", "objective"
    options = "link", "hosts", "network", "machine", "local", "slower", *plan
    asked = any(getattr(arguments, name) for name in options) or arguments.gpus is not None
    if subject.schedule is not None and not asked:
        return subject.schedule
    costs = costs_of(arguments, subject)
    return schedule(
        subject.graph,
        _machine(arguments, subject),
        policy=arguments.policy or "auto",
        seconds=arguments.seconds,
        seed=arguments.seed,
        progress=sys.stderr.isatty(),
        costs=costs,
        examples=examples_of(subject, costs),
        in_flight=arguments.in_flight,
        objective=arguments.objective or "makespan",
    )


def _machine(arguments: argparse.Namespace, subject: Subject) -> Machine:
    """Return the machine that options describe, or that of the subject, or 2 emulated GPUs."""
    cluster = arguments.hosts is not None or arguments.network is not None
    emulated = arguments.gpus is not None or arguments.link is not None or cluster
    asked = {"--hosts or --network" if cluster else "--gpus or --link": emulated}
    if arguments.local and arguments.link is None and not cluster:
        asked = {}  # --gpus is the number of local GPUs
    asked |= {"--machine": arguments.machine is not None, "--local": arguments.local}
    if len(names := [name for name, given in asked.items() if given]) > 1:
        raise UsageError(f"{' and '.join(names)} name different machines; give one of them")
    if arguments.local:
        machine = Machine.local(gpus=arguments.gpus)
    elif arguments.machine is not None:
        machine = read(arguments.machine, Machine.from_json)
    elif emulated or subject.machine is None:
        gpus = 2 if arguments.gpus is None else arguments.gpus
        machine = emulated_machine(gpus, arguments.link, arguments.hosts, arguments.network)
    else:
        machine = subject.machine
    return machine.slower(arguments.slower) if arguments.slower else machine


def emulated_machine(
    gpus: int, link: str | None, hosts: int | None, network: str | None
) -> Machine:
    """Return an emulated machine; a network alone asks for 2 hosts."""
    if network is None:
        return Machine.emulated(gpus, link, hosts=hosts)
    return Machine.emulated(gpus, link, hosts=hosts or 2, network=network)


def costs_of(arguments: argparse.Namespace, subject: Subject) -> Costs | None:
    """Return the costs of a file or of a saved schedule, or None."""
    if arguments.costs is not None:
        return read(arguments.costs, Costs.from_json)
    return None if subject.schedule is None else subject.schedule.costs


def examples_of(subject: Subject, costs: Costs | None) -> Mapping[str, Any] | None:
    """Return the inputs to estimate costs from, if costs are not given; note if there are none."""
    if costs is not None:
        return None
    if subject.inputs is None and not subject.graph.input_names:
        return {}
    if subject.inputs is None and all(task.seconds is None for task in subject.graph.tasks):
        say(
            "note: nothing tells what tasks cost, so each is taken to cost 10 us; "
            "return inputs too, or give --costs"
        )
    return subject.inputs


def inputs_of(subject: Subject) -> Mapping[str, Any]:
    """Return the inputs that came with a graph. Raises UsageError if required ones are missing."""
    name = subject.name
    if subject.inputs is None and subject.graph.input_names:
        how = "let its function return (graph, {name: tensor})"
        raise UsageError(f"{name} gives no inputs; {how}")
    return subject.inputs or {}


def read(path: Path, parse: Callable[[str], T]) -> T:
    """Return the content of a file. Raises UsageError that names the file, and OSError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (AutoschedError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error


def returned(text: str, inside: Any = None) -> Any:
    """Return what a function returns that is named as ``module:function``, called ``inside``."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        hint = "no such file, and no function"
        if text.endswith(".py"):
            hint = f"name a function in it, {text}:function"
        forms = "package.module:function, file.py:function or plan.json"
        raise UsageError(f"{text}: {hint}; a THING is {forms}")
    item = _attribute(_module(where), where, name)
    if callable(item) and not isinstance(item, Schedule):
        if _wants_arguments(item):
            signature = f"{name}{inspect.signature(item)}"
            raise UsageError(f"{text} is called without arguments, and it is {signature}")
        try:
            with inside or nullcontext():
                item = item()
        except Exception as error:
            raise UserCodeError(f"{text} failed") from error
    return item


def _built(text: str) -> Subject:
    """Return the subject that a function returns, named as ``module:function``."""
    item = returned(text)
    match item:
        case Schedule():
            return Subject(text, item.graph, None, item.machine, item)
        case Graph():
            return Subject(text, item)
        case (Graph() as graph, Mapping() as inputs):
            return Subject(text, graph, inputs)
        case (Graph() as graph, Mapping() as inputs, Machine() as machine):
            return Subject(text, graph, inputs, machine)
    raise UsageError(
        f"{text} must return a Graph, (Graph, inputs), (Graph, inputs, Machine) or a Schedule, "
        f"got {shown(type(item).__name__)}"
    )


def _module(where: str) -> Any:
    """Import a module, or a file as a script."""
    folder = Path(where).resolve().parent if where.endswith(".py") else Path.cwd()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return _run_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except UsageError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{where}.".startswith(f"{missing}."):
            places = "neither installed nor in this folder"
            raise UsageError(f"there is no module {missing!r}, {places}") from None
        raise UserCodeError(f"{where} cannot be imported") from error


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def _attribute(module: Any, where: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        key
        for key, item in vars(module).items()
        if inspect.isfunction(item)
        and item.__module__ == module.__name__
        and not key.startswith("_")
    ]
    raise UsageError(f"{where} has no {name!r}; its functions are {listed(own)}")


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # it is written in C and has no signature
        return False
    return False
