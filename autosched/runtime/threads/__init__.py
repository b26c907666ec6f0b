"""Threads that execute the steps of a program.

tapes          lists of steps by thread, and the protocol of a team that executes them
thread_team    a team of threads that stop together
interleaver    several threads simulated by one, in a chosen interleaving
straight_line  steps of one thread compiled into one function
"""
