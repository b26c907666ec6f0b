"""Recording a run once and replaying it.

segments     the parts of a program that can be recorded and replayed as one
cache        which runs are recorded and replayed; recordings, and what they must keep
cuda_graphs  recording on an accelerator: CUDA graphs
"""
