"""Threads that execute emitted functions.

runs         a run: what its threads do, how it ends, and where threads are
team         threads that execute runs, those of calls and those of loops; the rules of stopping them
interleaver  several threads simulated by one, in a chosen interleaving
"""
