"""Several machines and policies compared.

compare     ``compare()``: plans a graph for each combination
comparison  Comparison: the predictions as table, JSON and picture
"""
