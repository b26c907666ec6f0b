"""Training on several devices: data parallelism, model parallelism, and pipelines.

Each step is one graph, built by graph transformations on the public API of autosched::

    model --template--> operators of one micro-batch, forward and backward   (Template)
          --rewrite---> equivalent operators: checkpointing, zero bubbles
          --stages----> stage of each operator                               (Cuts)
          --micro_batch--> tasks: forward and backward of each stage         (MicroBatch)
          --updates---> optimizer step, by bucket of gradients               (Update)
          --step_graph--> replicas x stages x micro-batches, reduction,
                          clipping, updates                                  (StepGraph)
          --training--> schedule

Any model that can be captured can be cut, and the values that cross a cut are those that operators
read.

    data, model, pipelined       the public functions; what they return: step
    arguments, batches, plans    checks of arguments; rows of batches; cached plans of calls
    division                     rows by the speed and memory of devices
    steps_in_flight              steps that begin before the one before them has ended
    planned                      the plan of a step, and what it says of this process
    training                     captures micro-batches and updates, and schedules the step
    tuning, tuning_curve         stages, schedule and number of micro-batches, by simulation
    pipeline_schedules           GPipe, 1F1B, interleaved 1F1B, zero bubble
    buckets, all_reduce, compression, clip    gradients: bucketing, reduction, clipping
    ranks, shared_state          several processes: where a step lies, what they agree on before
                                 it; the state of rank 0
    checkpoints                  the state of a step in a folder
    step_spec, packing           what a step is built from; tensors as few messages
    costs                        costs of memory traffic, and for any number of rows
"""

from autosched.parallel.compression import Half, Int8, TopK
from autosched.parallel.data import data_parallel
from autosched.parallel.model import model_parallel
from autosched.parallel.pipelined import pipeline

__all__ = ["Half", "Int8", "TopK", "data_parallel", "model_parallel", "pipeline"]
