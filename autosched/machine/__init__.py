"""Describe machines: devices and links, as plain data.

cluster   the machine of all ranks: their devices, and whether NCCL can join their accelerators
device    Device, Link, and Network, between the devices of different ranks
machine   Machine: local, emulated or loaded from JSON
"""
