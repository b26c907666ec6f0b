"""Shared helpers that know nothing of scheduling.

aliasing      which bytes tensors and NumPy arrays occupy
aten          operators of this version of torch, by name
allowed       rules for names, device names and numbers
code_names    the names that code mentions
containers    containers of tensors among arguments and results
copying       copies of tensors on which kernels compute the same bits
cycles        the cycle of greatest ratio in a graph
display       registration of what draws graphs and timelines
fake_tensors  fake tensors with the strides of real kernels
fetching      the items of an iterable, ahead of use
files         atomic writes
forks         locks that are free in forked processes
gc_pause      pausing cyclic garbage collection
holders       who refers to a tensor and its memory
jit           compiling loops with numba where it pays off
json_reader   JSON checked against a shape
logs          the logger ``autosched``, and the user's line
process_group the processes that torch.distributed joins: agreements and failures
recent        the cache of schedules that were used last
replacing     replacing attributes for a while
tensor_guards comparing properties of tensors in compiled code
text          times, amounts, lists of names and tables as text
topological   topological order
tree          nested tuples, lists and dicts
"""
