"""Describe machines: devices and links, as plain data.

cluster   joining the processes that torchrun started
device    Device and Link
hardware  rough figures of common links, GPUs, CPUs and disks
network   Network, between the devices of different ranks
readers   the parts of a machine from JSON
sharing   the accelerators of each rank of a host, and whether NCCL can join them
machine   Machine: local, emulated or loaded from JSON
"""
