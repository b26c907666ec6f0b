"""Coarsening: a graph with fewer, larger tasks and the same results.

grouping  which tasks become one, by cost or by module
folding   which tasks may be merged at all
merging   the graph with each group as one task
"""
