"""Capture PyTorch code as graphs; compile functions.

capture           a function, module or training step as a graph of ATen operators
captured          captured graphs, called with a function's arguments
tracing           a call on fake tensors as nodes of ATen operators
operators         nodes as tasks
origins           module, phase and source line of an operator
state             the tensors of modules and optimizers
settings          learning rates as inputs, and counters of steps that are compared

compiled          functions and modules that are captured and scheduled when they are called
specializations   captures and schedules of a function, each for calls like an earlier one
reachability      the non-tensor objects that a function can read
every_rank        functions that all ranks of a machine call together

dynamo            the backend for ``torch.compile``; graphs of AOTAutograd

unsupported       errors for code that cannot be captured
side_effects      changes of objects outside of a function's arguments, also in C++ and in caches;
                  calls that a graph does not repeat
random_state      seeds of torch's generator as operators
replacements      functions that choose other operators while they are traced, and what is replaced
                  in torch for as long as a capture lasts, with reasons
capture_lock      one capture at a time
"""
