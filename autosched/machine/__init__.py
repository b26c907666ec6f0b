"""Describe machines: devices and links, as plain data.

cluster   joining the processes that torchrun started
device    Device and Link
network   Network, between the devices of different ranks
sharing   the accelerators of each rank of a host, and whether NCCL can join them
machine   Machine: local, emulated or loaded from JSON
"""
