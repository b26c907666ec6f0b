"""Prove that a program has no race.

verify      walks any program with vector clocks and names what is wrong
ranks       the laws of programs that span several ranks
parts       joins the parts of ranks, and proves that none waits for ever
machines    checks devices, streams, links and ranks
functional  the same proof over arrays, for graphs without in-place writes
"""
