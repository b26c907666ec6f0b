"""Represent graphs of tasks in serial order.

graph        Graph: the tasks of one step, and their dependencies
task         Task: a call and what it depends on
value        Value: a variable that tasks read and write
recorder     adding inputs, constants, outputs and tasks, with validation; versions of values, and
             values that share a storage
files        tensors in files
regions      which elements of a storage a view covers
effects      which arguments torch functions write, alias or draw random numbers for
including    one graph inserted into another, or copied task by task
constraints  devices of tasks and inputs by patterns of names; what is kept together
marked       ``@asc.task``: functions that are captured as one task
flow         producers and consumers as arrays
gradients    errors for gradients that autograd would lose
"""
