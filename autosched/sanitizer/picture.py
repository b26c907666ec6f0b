"""Draw what streams did around a finding, and the order that is missing, in red.

A row for each stream and the host, a box for each piece of work in the order of issue, arrows for
waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autosched.viz import svg

if TYPE_CHECKING:
    from autosched.sanitizer.findings import Finding

_BOX, _ROW, _TOP, _GAP = 104.0, 56.0, 60.0, 26.0
_AROUND = 9  # pieces of work that are drawn, besides the two of a finding


class Work(NamedTuple):
    """A piece of work in the order of issue; ``after`` has the work that a wait put it behind."""

    number: int
    stream: str
    what: str
    after: tuple[int, ...] = ()


def picture(finding: Finding, work: Sequence[Work]) -> str:
    """Return the SVG drawing of a finding that has two accesses."""
    first, second = finding.first, finding.second
    assert first is not None
    assert second is not None
    shown = _shown(work, first.number, second.number)
    known = {item.number for item in shown}
    if second.number not in known:  # the caller
        shown = [*shown, Work(second.number, second.stream, "the caller")]
    rows = list(dict.fromkeys([item.stream for item in shown] + [second.stream]))
    left = max(svg.text_width(name) for name in rows) + 24
    place = {
        item.number: (left + i * (_BOX + _GAP), _TOP + rows.index(item.stream) * _ROW)
        for i, item in enumerate(shown)
    }
    width = left + len(shown) * (_BOX + _GAP) + 14
    height = _TOP + len(rows) * _ROW + 34
    title = f"{finding.kind}: {finding.tensor}"
    body = [svg.text("ink title", 14, 30, svg.shorten(title, width - 28, svg.TITLE))]
    for k, name in enumerate(rows):
        body.append(svg.rect("track", left - 8, _TOP + k * _ROW, width - left, 30, 4))
        body.append(svg.text("ink", 14, _TOP + k * _ROW + 20, name))
    for item in shown:
        x, y = place[item.number]
        marked = item.number in (first.number, second.number)
        body.append(svg.rect("critical task" if marked else "task odd", x, y + 3, _BOX, 24, 3))
        label = svg.shorten(item.what, _BOX - 8, svg.LABEL)
        body.append(svg.text("on-task label" if marked else "ink label", x + 5, y + 19, label))
        for other in item.after:
            if other in place:
                a, b = place[other]
                body.append(svg.path("line", "M", a + _BOX, b + 15, "L", x, y + 15))
    a, b = place[first.number]
    x, y = place[second.number]
    body.append(
        f'<path d="M{a + _BOX:g} {b + 15:g}L{x:g} {y + 15:g}" '
        'style="fill:none;stroke:#d1242f;stroke-width:2.6;stroke-dasharray:6 4"/>'
    )
    note = svg.shorten(f"missing: {finding.missing}", width - 28)
    body.append(f'<text x="14" y="{height - 14:g}" style="fill:#d1242f">{svg.escape(note)}</text>')
    return svg.document(width, height, f"{title}; missing: {finding.missing}", body)


def _shown(work: Sequence[Work], first: int, second: int) -> list[Work]:
    """Return the two accesses, and what is nearest to them."""
    marked = [item for item in work if item.number in (first, second)]
    others = [item for item in work if item.number not in (first, second)]
    others.sort(key=lambda item: min(abs(item.number - first), abs(item.number - second)))
    return sorted([*marked, *others[:_AROUND]], key=lambda item: item.number)
