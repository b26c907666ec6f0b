"""What GPUs gain from schedules: copies under compute, branches on streams, graphs that replay, weights on the host.

A report and a JSON file for each question, and a summary of all, ``gpu.md``. Needs a GPU that torch can use, but for
``--rehearse``, which runs the same code in small to see that it works, on this CPU if need be, and writes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

import chapter
import inference
import issue
import offload
import probes
import ranks
import steps
import torch
from _record import Case, earlier, hardware, in_words, markdown, path_of_call, summary, write_json
from _report import RESULTS, parser, publish
from _rig import Rig
from contestants import CONTESTANTS

REPORTS = {
    "chapter": (chapter, "Copies under compute: the chapter's experiments"),
    "issue": (issue, "What issuing costs"),
    "offload": (offload, "Weights from host memory, under compute"),
    "steps": (steps, "Data parallel training steps"),
    "ranks": (ranks, "Copies between GPUs of two processes"),
    "inference": (inference, "Networks with branches, on one GPU"),
}
REHEARSAL = " (a rehearsal: times mean nothing)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return 1 if a case could not be measured, 2 where there is no GPU."""
    options = _options()
    chosen = options.parse_args(arguments)
    if chosen.rehearse and chosen.write and chosen.results == RESULTS:
        options.error("a rehearsal measures nothing that is worth writing")
    if chosen.probe is not None and not (chosen.played or torch.accelerator.is_available()):
        options.error("there is no GPU to ask; to ask simulated ones: --rehearse --played")
    if chosen.played and not chosen.rehearse:
        options.error("simulated GPUs are for rehearsals")
    with _played() if chosen.played else contextlib.nullcontext():
        return _run(chosen)


def _run(chosen: Namespace) -> int:
    if not chosen.rehearse and not torch.accelerator.is_available():
        print(
            "There is no GPU here that torch can use: nothing is measured. --rehearse runs the same code on the CPU."
        )
        return 2
    if chosen.probe is not None:
        return probes.main(chosen.probe, chosen.rehearse)
    rig = Rig(chosen.rehearse, chosen.quick, frozenset(chosen.leave_out or ()))
    names = [name for name in REPORTS if chosen.only in (None, name)]
    if not any(_chosen(REPORTS[name][0].cases(rig), chosen.case) for name in names):
        _options().error(f"no case has these words in its name: {chosen.case}")
    broken = sum(_report(name, rig, chosen) for name in names)
    if chosen.write:
        parts = [
            "Promises of all benchmarks.",
            *summary(path for name in REPORTS if (path := _path(chosen, name)).exists()),
        ]
        title = "What was promised of GPUs, and found" + REHEARSAL * rig.rehearse
        publish("gpu", title, parts, chosen, folder=chosen.results)
    return 1 if broken else 0


def _report(name: str, rig: Rig, chosen: Namespace) -> int:
    """Measure and publish, and return how many cases could not be measured."""
    module, title = REPORTS[name]
    machine, path = hardware(), _path(chosen, name)
    cases = earlier(path, machine) if chosen.write else {}
    own, found = path_of_call(chosen.results, f"gpu_{name}"), dict[str, Case]()
    broken = 0
    for label, measure in _chosen(module.cases(rig), chosen.case).items():
        print(f"measuring: {title}: {label}", file=sys.stderr, flush=True)
        try:
            rig.warm_clocks()
            found[label] = measure()
        except Exception as error:  # the other cases are worth having all the same
            traceback.print_exc()
            found[label] = Case(left_out={"everybody": f"{type(error).__name__}: {error}"})
            broken += 1
        cases[label] = found[label]
        if chosen.write:  # now, as whoever runs this may be out of time
            write_json(own, title, found, machine)
            write_json(path, title, cases, machine)
    parts = [
        (module.__doc__ or "").strip(),
        *markdown(cases, judged=not rig.rehearse),
        in_words(machine),
    ]
    publish(f"gpu_{name}", title + REHEARSAL * rig.rehearse, parts, chosen, folder=chosen.results)
    return broken


def _chosen(cases: Mapping[str, Callable[[], Case]], words: str) -> dict[str, Callable[[], Case]]:
    """Return the cases whose names contain these words, each of them whole."""
    wanted = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)" if words else "", re.IGNORECASE)
    return {label: measure for label, measure in cases.items() if wanted.search(label)}


def _path(chosen: Namespace, name: str) -> Path:
    return Path(chosen.results) / f"gpu_{name}.json"


def _played() -> contextlib.AbstractContextManager[Any]:
    """Return two simulated GPUs, which come with the tests of the repository."""
    sys.path.append(str(Path(__file__).parents[2]))
    from autosched.simulated_gpus import playing

    return playing(gpus=2, seed=1)


def _options() -> ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--only", choices=REPORTS, help="one report")
    options.add_argument(
        "--case", default="", metavar="WORDS", help="only cases with these words in their names"
    )
    options.add_argument(
        "--rehearse",
        action="store_true",
        help="run all code in small, on a CPU that plays GPUs if need be",
    )
    options.add_argument(
        "--played", action="store_true", help="rehearse on simulated GPUs: not steps and inference"
    )
    options.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="where --write writes"
    )
    options.add_argument(
        "--probe",
        nargs="?",
        const="",
        choices=("", *probes.PROBES),
        help="ask the GPU about what the design assumes, instead; one question, or all",
    )
    names = "; ".join(CONTESTANTS)
    options.add_argument(
        "--leave-out", action="append", metavar="NAME", help=f"a contestant, such as: {names}"
    )
    return options


if __name__ == "__main__":
    logging.basicConfig()
    logging.getLogger("autosched").setLevel(logging.DEBUG)  # tracebacks of what is not recorded
    sys.exit(main())
