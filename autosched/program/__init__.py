"""Represent programs, the instruction lists of schedules.

program        Program, its instructions, text form and parser
parts          the parts of ranks, with sends and receives for copies between them
host_streams   which streams wait for a CPU
units          which instructions can be issued as a whole
arrays         a program as arrays, for kernels
clocks         which instruction happens before which
residency      which version of a value is on which device during a walk
"""
