"""Runs in flight: several runs of a schedule that execute at the same time.

runs     submitting runs, in order; executing them, each in a slot; and waiting for them
future   what a caller gets for a run
"""
