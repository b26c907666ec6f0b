"""Policies that search: a portfolio of heuristics, simulated annealing, exact search.

portfolio    the best of many list schedules
search       that, improved by simulated annealing
annealer     annealing: moves, and the temperatures at which they are made
exact        an optimal placement, by ``constraint_programming``
splitting    stages on devices, for runs in flight
stage_moves  moves of units between stages
"""
