"""Predict the times and the memory of a program.

simulate   when each instruction runs
sharing    how much longer tasks take that share a device
issuing    which thread issues it, and how long that takes
plan       Plan: a placement, its program, and these predictions
periods    the steady-state seconds per run of a loop
footprint  how many bytes each device holds
"""
