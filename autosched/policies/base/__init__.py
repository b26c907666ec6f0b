"""Data structures and algorithms that policies share.

possible   devices that a task may still be placed on
kernels    start times of tasks and copies, list scheduling; compiled where that pays off
listing    whole lists of tasks, scheduled in one call
ranks      upward rank and other priorities
"""
