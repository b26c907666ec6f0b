"""Prove that a program has no race.

verify     the laws, and a walk that names what is wrong
conflicts  which accesses to memory must be ordered
loops      the proof that runs in flight do not race with each other
"""
