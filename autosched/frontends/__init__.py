"""Capture PyTorch code as graphs; compile functions.

capture           a function, module or training step as a graph of ATen operators
captured          captured graphs, called with a function's arguments
tracing           a call on fake tensors as nodes of ATen operators
operators         nodes as tasks
public_functions  the Python function that calls an ATen operator
origins           module, phase and source line of an operator
state             the tensors of modules and optimizers
settings          learning rates and other settings of optimizers as inputs
updates           which parameters an optimizer's operators update
granularity       how many operators become one task
collectives       functional collectives of torch.distributed

compiled          functions that are captured and scheduled when they are called
modules           compiled modules, which autograd records
guards            whether a call can use an earlier capture
reachability      the non-tensor objects that a function can read
recaptures        why a call cannot use an earlier capture
every_rank        functions that all ranks of a machine call together

dynamo            the backend for ``torch.compile``
aot               graphs of Dynamo and AOTAutograd as graphs of autosched

unsupported       errors for code that cannot be captured
side_effects      changes of objects outside of a function's arguments
hidden_state      iterators, generators and files that a step consumes
host_calls        time, files, print: calls that a graph does not repeat
caches            caches that hold tensors of a capture, or tensors for it
random_state      seeds of torch's generator as operators
eager_operators   functions that choose other operators while they are traced
rectified         both updates of RAdam, of which its counter chooses one
attention         fused attention kernels in a capture
fake_checks       code that behaves differently with fake tensors
compat            functions of newer torch versions for older ones
capture_lock      one capture at a time
"""
