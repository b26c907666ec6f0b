"""Runs in flight: several runs of a schedule that execute at the same time.

runs              submitting runs, in order, and waiting for them
future            what a caller gets for a run
batches           running a schedule on the items of an iterable
overlapping_runs  executing runs at the same time, each in a slot
"""
