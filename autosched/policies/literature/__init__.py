"""Policies from the literature, one paper in one module.

On the model of its paper each policy computes what the paper says; the examples of the papers are
tests. Beyond that model all of them support copies, streams, links and groups, through a common
``Plan``.

``policy="auto"`` tries only HEFT among them, since its portfolio of lists finds better plans than
the others; and where memory is limited, m-ETF and m-SCT.
"""
