"""``autosched run`` runs a schedule and compares it with the serial run.

The machine may be real or emulated.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autosched._lib.text import table
from autosched._lib.tree import flatten, transform
from autosched.cli.faults import CHECK_FAILED, TheirError, say
from autosched.cli.options import add_planning, count, planned
from autosched.cli.output import deliver, json_text, tracker
from autosched.cli.predict import devices
from autosched.cli.subject import Subject, add_thing, subject
from autosched.errors import AutoschedError, TaskError, UsageError
from autosched.scheduling.schedule import Schedule
from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg, perfetto_json
from autosched.viz.drawing import phases
from autosched.viz.paint import duration

__all__ = ["add", "inputs_of", "profiled"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="run a schedule, and compare with the serial run; exit with 1 if they differ",
        description="Run a schedule on this machine or an emulated one, and compare with the serial run bit for bit.",
        epilog="example: autosched run autosched.demo:mlp_example --slower 200 --profile",
    )
    add_thing(parser)
    parser.add_argument(
        "--profile", action="store_true", help="measure too, and show it beside what is predicted"
    )
    parser.add_argument(
        "--repeat", type=count, default=9, metavar="N", help="take the median of N (default: 9)"
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the profile there: .json for Perfetto, .html, .svg",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_planning(parser)
    parser.set_defaults(do=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.save is not None and arguments.save.suffix not in _SAVED:
        raise UsageError(f"{arguments.save}: a profile is written as {', '.join(_SAVED)}")
    found = subject(arguments.thing, arguments.graph)
    inputs = inputs_of(found, arguments.thing)
    with planned(arguments, found) as made:
        try:
            unequal, outputs = _compared(made, inputs, arguments.seed)
        except TaskError as error:
            raise TheirError(str(error)) from error.__cause__
        except AutoschedError:
            raise
        except Exception as error:
            raise TheirError(f"{arguments.thing} cannot be run serially") from error
        facts = {
            "equal": unequal is None,
            "outputs": {name: _shapes(item) for name, item in outputs.items()},
        }
        wanted = arguments.profile or arguments.save is not None
        measured = profiled(made, inputs, arguments.repeat) if wanted else None
        if measured is not None and arguments.save is not None:
            deliver(_SAVED[arguments.save.suffix](made, measured), arguments.save)
        if arguments.json:
            times = (
                {}
                if measured is None
                else {"predicted": _times(made), "measured": _times(made, measured)}
            )
            print(json_text({**facts, **times}))
        else:
            _tell(made, facts, measured)
    if unequal is not None:
        say(f"not equal to the serial run: {unequal}")
    return 0 if unequal is None else CHECK_FAILED


def inputs_of(found: Subject, thing: str) -> Mapping[str, Any]:
    """Return the inputs that came with a graph. Raises UsageError if required ones are missing."""
    if found.schedule is not None and any(task.fn is None for task in found.graph.tasks):
        raise UsageError(f"{thing} holds no functions; give them with --graph module:function")
    if found.inputs is None and found.graph.input_names:
        raise UsageError(
            f"{thing} gives no inputs; let its function return (graph, {{name: tensor}})"
        )
    return found.inputs or {}


def _compared(
    made: Schedule, inputs: Mapping[str, Any], seed: int
) -> tuple[str | None, dict[str, Any]]:
    """Run serially and by schedule; return how results differ, or None, and the outputs.

    Results are the outputs and the inputs that tasks write.
    """
    import torch

    from autosched.testing.comparing import difference

    results = []
    for run in (made.run_serial, made):
        mine = _own(made, inputs)
        torch.manual_seed(seed)
        results.append((run(**mine), mine))
    return difference(*results), results[1][0]


def _own(made: Schedule, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of inputs on the devices of the schedule, with the same sharing of memory."""
    mine = copy.deepcopy(dict(inputs))
    if made.machine.imagined:
        return mine
    for name, device in made.program.inputs:
        where = made.machine.device(device).physical or device
        if name in mine:
            mine[name] = transform(partial(_moved, where), mine[name])
    return mine


def _moved(where: str, leaf: Any) -> Any:
    return leaf.to(where) if hasattr(leaf, "to") else leaf


def profiled(made: Schedule, inputs: Mapping[str, Any], repeat: int) -> Timeline:
    """Return the median of some measured runs with fresh inputs, without the first."""
    runs = [made.profile(**_own(made, inputs)) for _ in tracker("profiling")(range(repeat + 1))]
    return Timeline.median(runs[1:])


def _trace(made: Schedule, measured: Timeline) -> str:
    return perfetto_json(
        made.simulate(), measured=measured, graph=made.graph, title=made.graph.name
    )


def _gantt(made: Schedule, measured: Timeline) -> str:
    return gantt_svg(
        made.simulate(), measured=measured, title=made.graph.name, phases=phases(made.graph)
    )


def _page(made: Schedule, measured: Timeline) -> str:
    return made.page(measured)


_SAVED = {
    ".json": _trace,
    ".html": _page,
    ".svg": _gantt,
}  # fields of a profile that are written beside the prediction


# ---- output


def _shapes(output: Any) -> list[dict[str, Any]]:
    return [
        {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
        if hasattr(leaf, "shape")
        else {"value": repr(leaf)}
        for leaf in flatten(output)
    ]


def _times(made: Schedule, measured: Timeline | None = None) -> dict[str, Any]:
    timeline = made.simulate() if measured is None else measured
    overlap = timeline.overlap()
    busy = {name: found["busy_seconds"] for name, found in devices(made, timeline).items()}
    return {
        "makespan": timeline.makespan,
        "copy_seconds": overlap.copy_seconds,
        "copies_hidden": overlap.copies_hidden if overlap.copy_seconds else None,
        "busy_seconds": busy,
    }


def _tell(made: Schedule, facts: Mapping[str, Any], measured: Timeline | None) -> None:
    kind = "emulated machine" if made.machine.imagined else "this machine"
    equal = (
        "equal to the serial run, bit for bit" if facts["equal"] else "NOT equal to the serial run"
    )
    print(f"ran {made.graph.name} on {', '.join(made.machine.names)} ({kind}): {equal}")
    for name, leaves in facts["outputs"].items():
        print(
            f"  {name}: "
            + ", ".join(leaf.get("value") or f"{leaf['dtype']} {leaf['shape']}" for leaf in leaves)
        )
    if measured is not None:
        print("\n" + "\n".join(_beside(_times(made), _times(made, measured))))


def _beside(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Sequence[str]:
    """Return a table of predicted and measured times."""

    def share(item: float | None) -> str:
        return "-" if item is None else f"{item:.0%}"

    both = predicted, measured
    rows = [
        ("makespan", *(duration(times["makespan"]) for times in both)),
        ("copies hidden", *(share(times["copies_hidden"]) for times in both)),
    ]
    for name in predicted["busy_seconds"]:
        rows.append((f"{name} busy", *(duration(times["busy_seconds"][name]) for times in both)))
    return table(("", "predicted", "measured"), rows)
