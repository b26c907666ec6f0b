"""Fuse tasks into regions that Inductor, or another compiler, compiles.

candidates    which tasks can be fused, and groups of them
inductor      compilation by Inductor, through public options, also with weights as constants
region        a compiled region, the function of its task; compared with its operators
rewriting     operators that Inductor computes otherwise
tracing       a region as one graph of operators
fusing        the choice among candidates: estimates, then runs in turns

Inductor generates kernels; what forms a region, and where and when it runs, is decided here and by
the planner. A fused graph is a graph: everything else treats a region as a merged task.
"""

from __future__ import annotations

from autosched.fusion.fusing import check_one_process, fuse, fused
from autosched.fusion.inductor import Frozen
from autosched.fusion.region import Compiler, compiler_of

__all__ = ["Compiler", "Frozen", "check_one_process", "compiler_of", "fuse", "fused"]
