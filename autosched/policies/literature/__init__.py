"""Policies from the literature, one paper in one module.

heft    a list schedule
baechi  m-ETF, which respects memory limits

On the model of its paper each policy computes what the paper says; the examples of the papers are
tests. Beyond that model all of them support copies, streams, links and groups, through a common
``Plan``.

``policy="auto"`` tries HEFT among them, and m-ETF where memory is short. Its portfolio of lists finds
better plans than the others.
"""
