"""Placements by constraint programming with OR-Tools CP-SAT (extra ``exact``).

integer_times  the problem in whole units of time
cpsat          the constraints
proof          improving a placement, and proving a lower bound
"""
