"""What GPUs gain from schedules: copies under compute, branches on streams, graphs that replay, weights on the host.

A report and a JSON file for each question, and a summary of all, ``gpu.md``. Needs a GPU that torch can use, but for
``--rehearse``, which runs the same code in small to see that it works, on this CPU if need be, and writes nothing.
"""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import chapter
import inference
import issue
import offload
import steps
import torch
from _record import Case, earlier, hardware, in_words, markdown, summary, write_json
from _report import RESULTS, parser, publish
from _rig import Rig
from contestants import CONTESTANTS

REPORTS = {
    "chapter": (chapter, "Copies under compute: the chapter's experiments"),
    "issue": (issue, "What issuing costs"),
    "offload": (offload, "Weights from host memory, under compute"),
    "steps": (steps, "Data parallel training steps"),
    "inference": (inference, "Networks with branches, on one GPU"),
}
REHEARSAL = " (a rehearsal: times mean nothing)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return 1 if a case could not be measured, 2 where there is no GPU."""
    options = _options()
    chosen = options.parse_args(arguments)
    if chosen.rehearse and chosen.write:
        options.error("a rehearsal measures nothing that is worth writing")
    if not chosen.rehearse and not torch.accelerator.is_available():
        print(
            "There is no GPU here that torch can use: nothing is measured. --rehearse runs the same code on the CPU."
        )
        return 2
    rig = Rig(chosen.rehearse, chosen.quick, frozenset(chosen.leave_out or ()))
    broken = sum(_report(name, rig, chosen) for name in REPORTS if chosen.only in (None, name))
    if chosen.write:
        parts = [
            "Promises of all benchmarks.",
            *summary(RESULTS / f"gpu_{name}.json" for name in _written()),
        ]
        publish("gpu", "What was promised of GPUs, and found", parts, chosen)
    return 1 if broken else 0


def _report(name: str, rig: Rig, chosen: Namespace) -> int:
    """Measure and publish, and return how many cases could not be measured."""
    module, title = REPORTS[name]
    machine, path = hardware(), RESULTS / f"gpu_{name}.json"
    cases = earlier(path, machine) if chosen.write else {}
    broken = 0
    for label, measure in _chosen(module.cases(rig), chosen.case).items():
        print(f"measuring: {title}: {label}", file=sys.stderr, flush=True)
        try:
            cases[label] = measure()
        except Exception as error:  # the other cases are worth having all the same
            traceback.print_exc()
            cases[label] = Case(left_out={"everybody": f"{type(error).__name__}: {error}"})
            broken += 1
        if chosen.write:  # now, as whoever runs this may be out of time
            write_json(path, title, cases, machine)
    parts = [
        (module.__doc__ or "").strip(),
        *markdown(cases, judged=not rig.rehearse),
        in_words(machine),
    ]
    publish(f"gpu_{name}", title + REHEARSAL * rig.rehearse, parts, chosen)
    return broken


def _chosen(cases: Mapping[str, Callable[[], Case]], words: str) -> dict[str, Callable[[], Case]]:
    return {label: measure for label, measure in cases.items() if words.lower() in label.lower()}


def _written() -> list[str]:
    return [name for name in REPORTS if (RESULTS / f"gpu_{name}.json").exists()]


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
    names = "; ".join(CONTESTANTS)
    options.add_argument(
        "--leave-out", action="append", metavar="NAME", help=f"a contestant, such as: {names}"
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
