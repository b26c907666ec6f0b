"""Training on several devices: data parallelism, model parallelism, and pipelines.

Each step is one graph. These are graph transformations built on the public API of autosched, as
users could build them. One micro-batch is captured once, as a whole; its operators become a few
pieces, which are included once for each micro-batch and replica; then gradients are summed, and
each device updates its own copy of its parameters. Stages, accumulation, checkpoints and zero
bubbles are made from that graph by including and merging, never by tracing modules separately. So
any model that can be captured can be cut, and the values that cross a cut are those that operators
read.

    template   one micro-batch as operators, and the update     -> Template
    rewrite    equivalent templates: for zero bubbles and for checkpointing
    stages     where a model is cut                             -> Cuts
    pieces     operators become tasks, with their costs         -> Pieces
    branches   parts of stages that need not wait for others
    updates    the optimizer's operators, cut by gradients      -> Update
    grid       replicas times stages times micro-batches        -> Graph
    step       what a user calls
    data, model, pipelined   the public functions
    planning   captures micro-batches and updates; schedules the step
    study      chooses cuts, order and number of micro-batches of a pipeline
    curve      predicted time of a step by number of micro-batches
    scaling    costs for any number of rows
    traffic    costs of tasks that only move memory
    clip       clipping of gradients
    orders     the order of pieces on each device
    buckets, reduce, compress    summing of gradients
    norms, levels, lockstep      batch norms over all replicas
"""

from autosched.parallel.compression import Half, Int8, TopK
from autosched.parallel.data import data_parallel
from autosched.parallel.model import model_parallel
from autosched.parallel.pipelined import pipeline

__all__ = ["Half", "Int8", "TopK", "data_parallel", "model_parallel", "pipeline"]
