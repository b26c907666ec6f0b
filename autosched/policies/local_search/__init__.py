"""Policies that search: a portfolio of heuristics, simulated annealing, exact search.

portfolio  the best of many list schedules
search     that, improved by simulated annealing
exact      an optimal placement, by ``constraint_programming``
splitting  stages on devices, for runs in flight
"""
