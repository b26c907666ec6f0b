"""Represent timelines: what ran when, predicted or measured.

timeline  Timeline and its measures; reading Chrome traces and those of torch.profiler
"""
