"""Fuse tasks into regions that Inductor compiles.

broadcasts    what kernels store, because others broadcast it
candidates    which tasks can be fused, and groups of them
depthwise     small depthwise convolutions as elementwise kernels
direct_calls  C++ functions of Inductor, called without its Python code
estimate      seconds of a region before it is compiled
inductor      compilation by Inductor
instructions  vector instructions of the CPU, found out early
joining       fewer waits: which regions are joined
kernel_code   changes to the kernels that Inductor generates
layouts       convolutions in channels-last layout
region        a compiled region, the function of its task
structure     what a region does, as text
timing        schedules compared by running them
fusing        the choice among candidates

Inductor generates kernels; what forms a region, and where and when it runs, is decided here and by
the planner. A fused graph is a graph: everything else treats a region as a merged task.
"""

from __future__ import annotations

from autosched.fusion.fusing import begin_probes_for, fuse

__all__ = ["begin_probes_for", "fuse"]
