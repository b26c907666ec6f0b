"""Data structures and algorithms that policies share.

possible   devices that a task may still be placed on
plan       a schedule under construction, task by task, with these kernels
ranks      upward rank and other priorities
turns      list scheduling: which ready task is placed next
room       free memory per device during placement
kernels    start times of tasks and copies, list scheduling; compiled where that pays off
listing    whole lists scheduled by these kernels
"""
