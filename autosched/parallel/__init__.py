"""Training on several devices: data parallel, model parallel, and pipelines, each step one graph.

Built on what autosched makes public and on nothing else, as users could build it. One micro-batch
is captured once; its operators become a few pieces, included as often as there are micro-batches
and replicas; then gradients are summed, and each device updates its own copy of what it holds.

    template   one micro-batch as operators, and the update     -> Template
    rewrite    the same in other words: for zero bubbles, to compute again what is not kept
    stages     where a model is cut                             -> Cuts
    pieces     operators become tasks, with what they cost      -> Pieces
    branches   parts of stages that need not wait for others
    updates    what the optimizer does with which gradients     -> Update
    grid       replicas times stages times micro-batches        -> Graph
    step       what a user calls

``clip`` scales gradients before an update. ``orders`` says who does which piece when; ``buckets``, ``reduce`` and
``compress`` how gradients are summed; ``norms``, ``levels`` and ``lockstep`` what replicas exchange in the middle of a
pass, for batch norms over all of them.
"""

from autosched.parallel.compress import Half, Int8, TopK
from autosched.parallel.data import data_parallel
from autosched.parallel.model import model_parallel
from autosched.parallel.pipelined import pipeline

__all__ = ["Half", "Int8", "TopK", "data_parallel", "model_parallel", "pipeline"]
