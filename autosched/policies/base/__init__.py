"""Data structures and algorithms that policies share.

problem    graph, machine and costs as tables
possible   devices that a task may still be placed on
plan       a schedule under construction: streams, start times, copies
ranks      upward rank and other priorities
turns      list scheduling: which ready task is placed next
room       free memory per device during placement
tables     the problem as flat arrays, for kernels
kernels    compiled kernels of list scheduling
listing    list scheduling with these kernels
"""
