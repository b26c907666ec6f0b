"""Threads that execute the steps of a program.

tapes             lists of steps by thread, and the protocol of a team that executes them
draining          the steps of one thread, as a function without loops or one by one, and how far it is
thread_team       a team of threads that stop together
interleaver       several threads simulated by one, in a chosen interleaving
loop_runs         runs of a loop, several of which are in flight
loop_team         a team of threads, each with a queue of runs
"""
