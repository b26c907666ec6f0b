"""Prove that a program has no race.

verify      walks any program with vector clocks and names what is wrong
parts       joins the parts of ranks, and proves that none waits for ever
functional  the same proof over arrays, for graphs without in-place writes
"""
