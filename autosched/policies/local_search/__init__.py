"""Policies that search: a portfolio of heuristics, simulated annealing, exact search."""
