"""Capture PyTorch code as graphs; compile functions.

capture       a function, module or training step as a graph of ATen operators
state         the tensors of modules and optimizers
operators     nodes of a traced graph as tasks
spelling      the Python function that calls an ATen operator
origins       module, phase and source line of an operator
updates       which parameters an optimizer's operators update
granularity   how many operators become one task
compiled      functions that are captured and scheduled when they are called
guards        whether a call can use an earlier capture
changes       why a call cannot use an earlier capture
reach         the non-tensor objects that a function can read
dynamo        the backend for ``torch.compile``
aot           graphs of Dynamo and AOTAutograd as graphs of autosched
described     names and source lines that Dynamo and AOTAutograd report
refusals      errors for code that cannot be captured
surroundings  changes that a step makes to objects outside its arguments
kept          properties of tensors that a step must not change
drawn         iterators, generators and files that a step consumes
calls         time, files, print: calls that a graph does not repeat
asking        code that behaves differently with fake tensors
attention     fused attention kernels in a capture
caches        caches that a capture must not read or fill
seeds         seeding of torch's generator as operators
faithful      functions that choose other operators while they are traced
older         functions of newer torch versions for older ones
exclusive     one capture at a time
"""
