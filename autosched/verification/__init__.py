"""Prove that a program has no race.

verify      walks any program with vector clocks and names what is wrong
functional  the same proof over arrays, for graphs without in-place writes
"""
