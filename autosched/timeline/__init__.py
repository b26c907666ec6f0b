"""Represent timelines: what ran when, predicted or measured.

timeline  Timeline and its measures
"""
