"""Operators of ATen by their names, in whatever version of torch there is."""

from __future__ import annotations

from typing import Any

import torch


def operators(names: str) -> frozenset[Any]:
    """Return those operators of which torch has some overload: versions drop and add operators.

    >>> operators("add no_such_operator") == {torch.ops.aten.add}
    True
    """
    found = (getattr(torch.ops.aten, name, None) for name in names.split())
    return frozenset(operator for operator in found if operator is not None)
