"""Threads that execute emitted functions.

team         how a run ends, and the protocol of a team
thread_team  a team of threads that stop together
interleaver  several threads simulated by one, in a chosen interleaving
loop_runs    runs of a loop, several of which are in flight
loop_team    a team of threads, each with a queue of runs
"""
