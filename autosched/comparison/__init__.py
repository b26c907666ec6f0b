"""Compare several machines and policies.

compare     ``compare()``: plans a graph for each combination
comparison  Comparison: the predictions as table, JSON and picture
"""
