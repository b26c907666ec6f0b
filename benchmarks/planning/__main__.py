"""How good and how fast planning is, beside proved optima and beside others: a report for each question.

``--data FOLDER`` adds graphs to those that are made here, as far as the folder has them: ``stg/``, Standard Task Graphs
(folders of ``.stg``) with ``makespans.csv``; ``layered/``, JSON of ``W[task][device]``, ``edges`` of [from, to,
seconds], ``lower_bound`` and ``best``; ``planted/``, the same with ``optimum``; and ``dnn_placement/``, the folders
``LayerGraphs`` and ``OperatorGraphs`` of github.com/msr-fiddle/dnn-partitioning.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import against_saga
import contention
import memory
import networks
import peers
import quality
import speed
import throughput
import training
from _report import parser, publish

REPORTS = {
    "quality": (quality, "Plans beside optima"),
    "contention": (contention, "Plans where copies occupy copy streams"),
    "networks": (networks, "Plans of networks for one sample"),
    "throughput": (throughput, "Pipelines of networks"),
    "training": (training, "Plans of training steps"),
    "memory": (memory, "Plans with half of the memory"),
    "saga": (against_saga, "Planning, beside SAGA"),
    "peers": (peers, "Planning, beside networkx and OR-Tools"),
    "speed": (speed, "How fast planning is"),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="a folder of graphs to read")
    options.add_argument("--only", choices=REPORTS, help="one report")
    chosen = options.parse_args()
    for name, (module, title) in REPORTS.items():
        if chosen.only in (None, name):
            about = (module.__doc__ or "").strip()
            publish(
                f"planning_{name}",
                title,
                [about, *module.report(chosen)],
                chosen,
                ("torch", "networkx", "numpy"),
            )


if __name__ == "__main__":
    main()
