"""Execution over several ranks: processes that torch.distributed joins.

wire       sends and receives of rows of bytes, over gloo
messages   values as rows of bytes, and headers that describe them
session    what the ranks tell each other of failures
watch      learning that another rank has gone
heartbeat  learning that another rank is stopped, or its host is lost
exchange   copies between ranks as works that events stand for
waits      the copies that each wait must wait for
gathering  small exchanges of all ranks: a few numbers, and values of rank 0
reducing   the all-reduce of torch.distributed
generators random numbers of several ranks in one process
profiling  runs of all ranks on the clock of rank 0
backend    the backend of a rank that has CPUs alone
direct     copies between accelerators without a stop in host memory
nccl       the wire of these: communicators of NCCL
accelerators   the backend of a rank that has accelerators
"""
