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

from autosched._lib.replacing import replaced
from autosched.frontends.capture_lock import is_capturing

__all__ = ["FakeChecks", "observing_fake_checks", "warn_of_fake_check"]

_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows it once for each step


class FakeChecks:
    """The lines that tested for fake tensors in a capture.

    The test is False, as it would be in an eager call, unless ``truthful``.
    """

    def __init__(self) -> None:
        self.truthful = False
        self.lines: list[tuple[str, int]] = []

    def answer(self) -> bool:
        """Store the caller's line, and return the result of the test."""
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autosched"):
            return True
        self.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return self.truthful


@contextlib.contextmanager
def observing_fake_checks(checks: FakeChecks) -> Iterator[None]:
    """Let ``checks`` answer ``isinstance(tensor, torch._subclasses.FakeTensor)`` in a capture."""

    class Kind(type(FakeTensor)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, FakeTensor) and (not is_capturing() or checks.answer())

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, FakeTensor)

    with replaced((torch._subclasses, "FakeTensor", Kind("FakeTensor", (FakeTensor,), {}))):
        yield


def warn_of_fake_check(check: tuple[str, int], why: str, step: tuple[str, int]) -> None:
    """Warn that a step was captured differently from an eager call. ``why`` is the reason."""
    warnings.warn_explicit(
        f"{check[0]}:{check[1]} checks whether a tensor is a fake one, and then runs other code "
        "than in an eager call: results may differ in the last bits (leave out a mask that masks "
        f"nothing). The code of the eager call {why}",
        RuntimeWarning,
        *step,
        registry=_WARNED,
    )
