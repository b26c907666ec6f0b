"""Prove that a program has no race.

verify  the laws, and a walk that names what is wrong
loops   the proof that runs in flight do not race with each other
ranks   the laws of programs that span several ranks
parts   joins the parts of ranks, and proves that none waits for ever
"""
