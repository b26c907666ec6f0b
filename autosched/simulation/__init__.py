"""Predict the times and the memory of a program.

simulate   when each instruction runs
issuing    which thread issues it, and how long that takes
footprint  how many bytes each device holds
"""
