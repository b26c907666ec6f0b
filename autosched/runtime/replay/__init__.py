"""Recording a run once and replaying it.

segments     the parts of a program that can be recorded and replayed as one
cache        which runs are recorded and replayed; recordings, and what they must keep
outputs      outputs of a recording that later replays do not overwrite
cuda_graphs  recording on an accelerator: CUDA graphs
"""
