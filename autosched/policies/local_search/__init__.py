"""Policies that search: a portfolio of heuristics, simulated annealing, exact search.

portfolio    the best of many list schedules
search       that, improved by simulated annealing
annealer     annealing for a number of moves or seconds; its kernels are in ``annealing``
exact        an optimal placement, by ``constraint_programming``
splitting    stages on devices, for runs in flight
stage_moves  moves between stages, and the loads that they change
"""
