"""Describe machines: devices and links, as plain data.

device   Device and Link
machine  Machine: local, emulated or loaded from JSON
"""
