"""Policies from the literature, one paper in one module.

heft, peft, cpop, lookahead   list schedules, by their names in the literature
lookahead                       HEFT that looks at successors
baechi                          m-ETF and m-SCT, which respect memory limits

On the model of its paper each policy computes what the paper says; the examples of the papers are
tests. Beyond that model all of them support copies, streams, links and groups, through a common
``Plan``.

``policy="auto"`` tries only HEFT among them. Its portfolio of lists finds better plans than the
others, except for some plans of lookahead HEFT on graphs where copies take most of the time; the
search reaches those.
"""
