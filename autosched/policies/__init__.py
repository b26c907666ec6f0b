"""Policies: where each task runs, and in which order tasks are issued.

A policy is a pure function ``(graph: Graph, machine: Machine, costs: Costs) -> Placement``. It
returns no times, chooses no streams, makes no copies. Its answer passes ``placement.check`` and
needs no copy between devices without a link; where nothing like that exists it raises ScheduleError
naming the task, the devices and why.

To add one, write such a function in a file of its own, with the paper it comes from in its
docstring, and enter it in ``POLICIES``; the tests run over that table. ``Problem`` has graph,
machine and costs as tables, ``Possible`` keeps track of where tasks may still go, ``Room`` of the
bytes on each device, ``ranks`` measures tasks, ``Plan`` times them and their copies, ``turns``
places them one by one. A policy with parameters is a function that returns one, as
``single_on(device)``, ``in_order(sequences)`` and ``robust(noise)`` do. Any function of this signature works as
``policy=`` without being in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autosched.policies.base.problem import Policy
from autosched.policies.candidates import candidates
from autosched.policies.in_order import in_order
from autosched.policies.literature.cpop import cpop
from autosched.policies.literature.dls import dls
from autosched.policies.literature.heft import heft
from autosched.policies.literature.lookahead import lookahead
from autosched.policies.literature.m_etf import m_etf
from autosched.policies.literature.m_sct import m_sct
from autosched.policies.literature.min_min import max_min, min_min, sufferage
from autosched.policies.literature.peft import peft
from autosched.policies.local_search.exact import exact
from autosched.policies.local_search.portfolio import portfolio
from autosched.policies.local_search.search import Progress, search
from autosched.policies.robust import robust
from autosched.policies.round_robin import round_robin
from autosched.policies.single import single, single_on

__all__ = [
    "POLICIES",
    "TIMED",
    "Policy",
    "Progress",
    "candidates",
    "cpop",
    "dls",
    "exact",
    "heft",
    "in_order",
    "lookahead",
    "m_etf",
    "m_sct",
    "max_min",
    "min_min",
    "peft",
    "portfolio",
    "robust",
    "round_robin",
    "search",
    "single",
    "single_on",
    "sufferage",
]

TIMED: Mapping[str, Callable[..., Policy]] = {"search": search, "exact": exact}
"""Policies that look for better plans for as long as they are told: functions (seconds, seed, progress=) of them."""

POLICIES: Mapping[str, Policy] = {
    "single": single,
    "round_robin": round_robin,
    "heft": heft,
    "portfolio": portfolio,
    "lookahead": lookahead,
    "peft": peft,
    "cpop": cpop,
    "dls": dls,
    "min_min": min_min,
    "max_min": max_min,
    "sufferage": sufferage,
    "m_etf": m_etf,
    "m_sct": m_sct,
}
