"""Represent programs, the instruction lists of schedules.

program        Program, its instructions, text form and parser
parts          the parts of ranks, with sends and receives for copies between them
units          what is issued as a whole, and what by a thread of its own
arrays         a program as arrays, for kernels
clocks         which instruction happens before which
residency      which version of a value is on which device during a walk
"""
