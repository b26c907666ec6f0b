"""What the sanitizer reports: findings, advice, and both as text and JSON.

Knows no GPU and no stream: all is text and numbers already.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from autosched.sanitizer.picture import Work, picture


@dataclass(frozen=True)
class Line:
    """A line of the user's code."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        here = os.getcwd() + os.sep
        return f"{self.file.removeprefix(here)}:{self.number}, in {self.function}"


@dataclass(frozen=True)
class Access:
    """What one stream, or the host, did."""

    what: str  # "aten.add.Tensor writes"
    stream: str
    lines: tuple[Line, ...]  # the innermost first
    number: int = 0  # in the order of issue

    def __str__(self) -> str:
        where = "".join(f"\n      {line}" for line in self.lines) or "\n      (no line of yours)"
        return f"{self.what} on {self.stream}{where}"


@dataclass(frozen=True)
class Finding:
    """A mistake: two accesses that some legal execution reverses, or what else went wrong.

    ``tensor`` is the user's name of the tensor, ``names`` are all that were found. ``missing`` is the
    order that is missing, ``fix`` a line that makes it, and ``outcome`` what running in other orders
    gave, if numbers were computed. Print it to read all.

    >>> print(Finding("event", "stream 1 of cuda:0 waits for an event that is never recorded"))
    event: stream 1 of cuda:0 waits for an event that is never recorded
    """

    kind: str
    message: str
    tensor: str = ""
    names: tuple[str, ...] = ()  # all names of the tensor that were found
    first: Access | None = None
    second: Access | None = None
    missing: str = ""  # the order that is missing
    fix: str = ""
    times: int = 1
    outcome: str = ""  # what a run in another order gave

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.message}"]
        parts += [f"  first:  {self.first}"] if self.first else []
        parts += [f"  second: {self.second}"] if self.second else []
        parts += [f"  missing: {self.missing}"] if self.missing else []
        parts += [f"  to mend: {self.fix}"] if self.fix else []
        parts += [f"  in another order: {self.outcome}"] if self.outcome else []
        parts += [f"  ({self.times} times)"] if self.times > 1 else []
        return "\n".join(parts)


@dataclass(frozen=True)
class Advice:
    """A wait or synchronisation that can go."""

    message: str
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return f"{self.message}\n      {self.lines[0] if self.lines else '(no line of yours)'}"


@dataclass(frozen=True)
class Report:
    """What ``sanitize`` found; print it.

    ``findings`` are the mistakes, ``advice`` the waits and synchronisations that can be left out,
    each by itself; ``result`` is what the function returned.

    >>> print(Report(operations=7))
    no findings in 7 operations on GPUs
    """

    findings: tuple[Finding, ...] = ()
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    result: Any = field(default=None, compare=False, repr=False)  # what the function returned
    operations: int = 0
    work: tuple[Work, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        n = len(self.findings)
        head = f"{n or 'no'} finding{'s' * (n != 1)} in {self.operations} operations on GPUs"
        parts = [head, *map(str, self.findings)]
        parts += [f"advice: {item}" for item in self.advice]  # each alone
        parts += [f"note: {note}" for note in self.notes]
        return "\n\n".join(parts)

    def svg(self, number: int = 0) -> str:
        """Draw what streams did around a finding, with the missing order in red.

        Raises IndexError without such a finding, and ValueError if it is not of two accesses.
        """
        finding = self.findings[number]
        if finding.first is None or finding.second is None:
            raise ValueError(f"this finding has no two accesses to draw: {finding.message}")
        return picture(finding, self.work)

    def to_json(self) -> dict[str, Any]:
        """Return findings, advice and notes as what JSON has."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "advice": [asdict(item) for item in self.advice],
            "notes": list(self.notes),
            "operations": self.operations,
        }
