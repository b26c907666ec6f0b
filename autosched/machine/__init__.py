"""Machines: devices and the links between them, as plain data."""
