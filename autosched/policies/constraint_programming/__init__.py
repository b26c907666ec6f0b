"""Placements by constraint programming with OR-Tools CP-SAT (extra ``exact``).

integer_times  the problem in integer times
cpsat          the constraints
proof          improving a placement, and proving a lower bound
"""
