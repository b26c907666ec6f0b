"""Predict the times and the memory of a program.

simulate   when each instruction runs
footprint  how many bytes each device holds
"""
