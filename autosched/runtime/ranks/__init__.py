"""Execution over several ranks: processes that torch.distributed joins.

backend    the backend of a rank, with CPUs alone or with accelerators
exchange   copies between ranks as works that events stand for
messages   values as rows of bytes, and descriptions of them
generators random numbers of several ranks in one process
"""
