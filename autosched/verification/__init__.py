"""Prove that a program has no race.

verify      the laws, and the choice of the proof
verifier    walks any program with vector clocks and names what is wrong
loops       the proof that runs in flight do not race with each other
ranks       the laws of programs that span several ranks
parts       joins the parts of ranks, and proves that none waits for ever
machines    checks devices, streams, links and ranks
functional  the same proof over arrays, for graphs without in-place writes
"""
