"""Fuse tasks into regions that Inductor compiles.

candidates    which tasks can be fused, and groups of them
comparison    whether kernels compute what their operators do
estimate      seconds of a region before it is compiled
inductor      compilation by Inductor, through public options
joining       fewer waits: which regions are joined
region        a compiled region, the function of its task
rewriting     operators that Inductor computes otherwise
structure     what a region does, as text
timing        schedules compared by running them
tracing       a region as one graph of operators
fusing        the choice among candidates

Inductor generates kernels; what forms a region, and where and when it runs, is decided here and by
the planner. A fused graph is a graph: everything else treats a region as a merged task.
"""

from __future__ import annotations

from autosched.fusion.fusing import fuse

__all__ = ["fuse"]
