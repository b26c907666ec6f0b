"""Training on several devices: data parallelism, model parallelism, and pipelines.

Each step is one graph, built by graph transformations on the public API of autosched::

    model --template--> operators of one micro-batch, forward and backward   (Template);
                        equivalent ones for random numbers and zero bubbles
          --stages----> stage of each operator                               (Cuts)
          --micro_batch--> tasks: forward and backward of each stage         (MicroBatch)
          --updates---> optimizer step, by bucket of gradients               (Update)
          --step_graph--> replicas x stages x micro-batches, reduction,
                          clipping, updates                                  (StepGraph)
          --training--> schedule

Any model that can be captured can be cut, and the values that cross a cut are those that operators
read.

    data, pipelined           the public functions; pipelined simulates stages, orders and numbers
                              of micro-batches
    step                      what they return: cached plans of calls, steps in flight
    training, batches         captures micro-batches and updates, and schedules; rows of batches
    step_graph, costs         graphs of steps, and tasks of memory traffic
    all_reduce, clip          gradients: bucketing, reduction, compression, clipping
    orders, named_orders      what each device of a pipeline does, one action after another; by name
    zero_bubbles, controlled_memory, order_search
                              orders that fill bubbles with gradients by weights, that repeat a
                              pattern of little memory, and that are annealed
    ranks, checkpoints        several processes: where a step lies, what they agree on before it, the
                              state of rank 0; the state of a step in a folder
"""

from autosched.parallel.all_reduce import Half, Int8, TopK
from autosched.parallel.data import data_parallel
from autosched.parallel.named_orders import order
from autosched.parallel.orders import Action, Order
from autosched.parallel.pipelined import model_parallel, pipeline

__all__ = [
    "Action",
    "Half",
    "Int8",
    "Order",
    "TopK",
    "data_parallel",
    "model_parallel",
    "order",
    "pipeline",
]
