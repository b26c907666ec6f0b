"""Runs in flight: several runs of a schedule that execute at the same time.

runs              submitting runs, in order, and waiting for them
future            what a caller gets for a run
batches           running a schedule on the items of an iterable
overlaps          inputs of different runs that share memory
overlapping_runs  executing runs at the same time, each in a slot
slots             the memory and the steps of each slot, and the locks between them
deadlines         aborting runs that are late
single_runs       executing one run at a time, in a thread of its own
"""
