"""Policies from the literature, one paper in one module."""
