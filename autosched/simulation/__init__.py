"""Predictions of a program: times and memory.

simulate   when each instruction runs
footprint  how many bytes each device holds
"""
