"""Run a schedule and compare it with the serial run.

The machine may be real or emulated.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from typing import Any

from autosched._lib.text import duration, table
from autosched._lib.tree import flatten, transform
from autosched.cli.loading import inputs_of, planned, subject_of
from autosched.cli.output import CHECK_FAILED, UserCodeError, deliver, json_text, say, tracker
from autosched.errors import AutoschedError, TaskError, UsageError
from autosched.scheduling.schedule import Schedule
from autosched.timeline.timeline import Timeline
from autosched.viz import gantt_svg, perfetto_json
from autosched.viz.drawing import phases

__all__ = ["profiled", "run"]

_SUFFIXES = (".json", ".html", ".svg")  # of files with a profile


def run(arguments: argparse.Namespace) -> int:
    """Run a schedule, compare it with the serial run, and profile it."""
    path = arguments.save
    if path is not None and path.suffix not in _SUFFIXES:
        raise UsageError(f"{path}: a profile is written as {', '.join(_SUFFIXES)}")
    subject = subject_of(arguments)
    inputs = inputs_of(subject)
    with planned(arguments, subject) as made:
        try:
            unequal, outputs = _run_both(made, inputs, arguments.seed)
        except TaskError as error:
            raise UserCodeError(str(error)) from error.__cause__
        except AutoschedError:
            raise
        except Exception as error:
            raise UserCodeError(f"{arguments.thing} cannot be run serially") from error
        measured = None
        if arguments.profile or path is not None:
            measured = profiled(made, inputs, arguments.repeat)
        if measured is not None and path is not None:
            deliver(_profile(made, measured, path.suffix), path)
        times = {}
        if measured is not None:
            predicted = _times(made, made.simulate())
            times = {"predicted": predicted, "measured": _times(made, measured)}
        leaves = {name: _leaves(output) for name, output in outputs.items()}
        if arguments.json:
            print(json_text({"equal": unequal is None, "outputs": leaves, **times}))
        else:
            _print_result(made, unequal is None, leaves)
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


def _run_both(
    made: Schedule, inputs: Mapping[str, Any], seed: int
) -> tuple[str | None, dict[str, Any]]:
    """Run serially and by schedule; return how results differ, or None, and the outputs.

    Results are the outputs and the inputs that tasks write.
    """
    import torch

    from autosched.testing.comparing import difference

    results = []
    for call in (made.run_serial, made):
        own = _copied(made, inputs)
        torch.manual_seed(seed)
        results.append((call(**own), own))
    return difference(*results), results[1][0]


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


def _leaves(output: Any) -> list[dict[str, Any]]:
    """Return shape and dtype of the tensors of an output, and the repr of anything else."""
    return [
        {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
        if hasattr(leaf, "shape")
        else {"value": repr(leaf)}
        for leaf in flatten(output)
    ]


def _times(made: Schedule, timeline: Timeline) -> dict[str, Any]:
    overlap = timeline.overlap()
    return {
        "makespan": timeline.makespan,
        "copy_seconds": overlap.copy_seconds,
        "copies_hidden": overlap.copies_hidden if overlap.copy_seconds else None,
        "busy_seconds": {name: timeline.computing(name) for name in made.machine.names},
    }


def _print_result(made: Schedule, equal: bool, outputs: Mapping[str, Any]) -> None:
    kind = "emulated machine" if made.machine.imagined else "this machine"
    how = "equal to the serial run, bit for bit" if equal else "NOT equal to the serial run"
    print(f"ran {made.graph.name} on {', '.join(made.machine.names)} ({kind}): {how}")
    for name, leaves in outputs.items():
        texts = [leaf.get("value") or f"{leaf['dtype']} {leaf['shape']}" for leaf in leaves]
        print(f"  {name}: {', '.join(texts)}")


def _table(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
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
