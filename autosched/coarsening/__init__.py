"""Merge tasks into fewer, larger tasks with the same results.

folding   which tasks may be merged at all
merging   groups of tasks, and the graph with each group as one task

Merging is a function from graph to graph, and precedes everything else: a merged task is a task
with parts, and only costs, the estimate and generated code look at the parts.
"""
