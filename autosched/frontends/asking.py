"""Detect code that behaves differently because its tensors are fake.

Libraries test whether a tensor is a fake one in order not to read its elements (for example to
build masks, in the transformers library). Their results may then differ from those of an eager
call. Knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosched.frontends.exclusive import is_capturing

__all__ = ["Asked", "answered", "warn_of_asking"]

_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows it once for each step


class Asked:
    """The lines that tested for fake tensors in a capture.

    ``told`` is whether the test returns the truth.
    """

    def __init__(self) -> None:
        self.told = False
        self.lines: list[tuple[str, int]] = []

    def answer(self) -> bool:
        """Store the line of the caller, and return the result of the test."""
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autosched"):
            return True
        self.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return self.told


@contextlib.contextmanager
def answered(asked: Asked) -> Iterator[None]:
    """Let ``asked`` decide ``isinstance(tensor, torch._subclasses.FakeTensor)`` in a capture."""

    class Kind(type(FakeTensor)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, FakeTensor) and (not is_capturing() or asked.answer())

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, FakeTensor)

    stand_in = Kind("FakeTensor", (FakeTensor,), {})
    package: Any = torch._subclasses
    package.FakeTensor = stand_in
    try:
        yield
    finally:
        package.FakeTensor = FakeTensor


def warn_of_asking(asked: tuple[str, int], why: str, step: tuple[str, int]) -> None:
    """Warn that a step was captured differently from an eager call. ``why`` is the reason."""
    warnings.warn_explicit(
        f"{asked[0]}:{asked[1]} asks whether a tensor is a fake one, and code goes another way then than eagerly: "
        f"results may differ in the last bits (of a mask that masks nothing; leave it out). The eager way {why}",
        RuntimeWarning,
        *step,
        registry=_WARNED,
    )
