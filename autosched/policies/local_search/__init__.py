"""Policies that search: a portfolio of heuristics, simulated annealing, exact search.

portfolio    the best of many list schedules
search       that, improved by simulated annealing; or to an optimum, by ``constraint_programming``
annealer     annealing: moves, and the temperatures at which they are made
splitting    stages on devices, for runs in flight
"""
