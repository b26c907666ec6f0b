"""Estimate the seconds of tasks and the bytes of values.

costs     Costs: tables, and a roofline model for what they do not contain
estimate  work and bytes from example inputs, computed with fake tensors
learning  costs from a measured timeline
"""
