"""Describe machines: devices and links, as plain data.

device   Device and Link
network  Network, between the devices of different ranks
readers  the parts of a machine from JSON
machine  Machine: local, emulated or loaded from JSON
"""
