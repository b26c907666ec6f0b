"""Predict the times and the memory of a program.

simulate   when each instruction runs
issuing    which thread issues it, and how long that takes
periods    the steady-state seconds per run of a loop
footprint  how many bytes each device holds
"""
