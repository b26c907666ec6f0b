"""Provide colours, patterns and text formatting for all drawings.

Colours are from Okabe and Ito, "Color Universal Design" (2008), and can be distinguished with every
kind of colour blindness. Copies between devices are hatched as well, so that drawings can be read
without colour. Knows no graph and no program.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

from autosched._lib.text import duration, time_unit
from autosched.program.program import Stream
from autosched.timeline.timeline import Timeline

__all__ = [
    "FONT_SIZE",
    "HEADS",
    "LABEL",
    "PHASES",
    "SERIES",
    "TITLE",
    "columns",
    "document",
    "duration",
    "escape",
    "idle_shares",
    "legal",
    "legend",
    "legend_width",
    "light",
    "natural",
    "number",
    "shorten",
    "shorten_path",
    "sorted_streams",
    "summary",
    "text_width",
    "ticks",
]

FONT_SIZE = 12.0  # of text, of text in narrow boxes, of titles
LABEL = 10.5
TITLE = 17.0
PHASES = ("backward", "optimizer")  # of tasks: these have colours of their own, as on the page
_EM = 0.58  # average width of a character, in font sizes, for the wider of usual fonts

# Colours of series, light and dark: blue, vermilion, green, purple, sky blue, orange.
_SERIES = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0803c"),
    ("#009e73", "#2bc08f"),
    ("#b8629a", "#dd94bd"),
    ("#56b4e9", "#f0e442"),
    ("#e69f00", "#e69f00"),
)
SERIES = len(_SERIES)

# Class, its style in light colours, and what differs in dark ones.
_STYLES: Sequence[tuple[str, str, str]] = (
    ("paper", "fill:#ffffff", "fill:#0d1117"),
    ("ink", "fill:#1f2328", "fill:#e6edf3"),
    ("muted", "fill:#59636e", "fill:#9198a1"),
    ("track", "fill:#f3f5f8", "fill:#171c24"),
    ("grid", "stroke:#d9dee4", "stroke:#2d343d"),
    ("task", "fill:#0072b2;stroke:#ffffff", "fill:#56b4e9;stroke:#0d1117"),
    ("backward", "fill:#009e73;stroke:#ffffff", "fill:#2bc08f;stroke:#0d1117"),
    ("optimizer", "fill:#b8629a;stroke:#ffffff", "fill:#dd94bd;stroke:#0d1117"),
    ("view", "fill:#ffffff;stroke:#0072b2", "fill:#0d1117;stroke:#56b4e9"),
    ("input", "fill:#ffffff;stroke:#59636e", "fill:#0d1117;stroke:#9198a1"),
    ("copy", "fill:url(#autosched-hatch);stroke:#ffffff", "stroke:#0d1117"),
    ("ground", "fill:#f3bf4f", "fill:#e69f00"),
    ("stripe", "fill:#e69f00", "fill:#b87f00"),
    ("thin", "stroke:none", "stroke:none"),
    (
        "pause",
        "fill:#b8629a;fill-opacity:.3;stroke:#b8629a;stroke-width:.8",
        "fill:#dd94bd;stroke:#dd94bd",
    ),
    ("critical", "stroke:#1f2328;stroke-width:2", "stroke:#ffffff"),
    ("critical.thin", "stroke:#1f2328;stroke-width:.6", "stroke:#ffffff"),
    ("on-task", "fill:#ffffff", "fill:#0d1117"),
    (
        "on-copy",
        "fill:#1f2328;stroke:#f3bf4f;stroke-width:3;paint-order:stroke",
        "fill:#0d1117;stroke:#e69f00",
    ),
    (
        "line",
        "fill:none;stroke:#59636e;stroke-width:1.2;marker-end:url(#autosched-head)",
        "stroke:#9198a1",
    ),
    ("wait", "stroke-width:1", ""),
    ("order", "stroke-dasharray:5 3", ""),
    ("anti", "stroke-dasharray:1.5 3", ""),
    ("move", "stroke:#e69f00;stroke-width:2.4;marker-end:url(#autosched-move)", "stroke:#e69f00"),
    ("along", "stroke:#1f2328;stroke-width:2.6;marker-end:url(#autosched-along)", "stroke:#ffffff"),
    (
        "move.along",
        "stroke:#e69f00;stroke-width:4.5;marker-end:url(#autosched-move)",
        "stroke:#e69f00",
    ),
    ("faint", "stroke-width:.7;opacity:.55", ""),
    ("halo", "stroke:#ffffff;stroke-width:4;paint-order:stroke", "stroke:#0d1117"),
    ("frame", "fill:none;stroke:#59636e;stroke-width:.8", "stroke:#9198a1"),
    ("head", "fill:#59636e", "fill:#9198a1"),
    ("head-move", "fill:#e69f00", ""),
    ("head-along", "fill:#1f2328", "fill:#ffffff"),
    *((f"series{i}", f"color:{light}", f"color:{dark}") for i, (light, dark) in enumerate(_SERIES)),
    (
        "curve",
        "fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round",
        "",
    ),
    ("course", "stroke-width:1.6;stroke-linejoin:miter;stroke-linecap:butt", ""),
    ("area", "fill:currentColor;fill-opacity:.22", ""),
    (
        "limit",
        "fill:none;stroke:#d55e00;stroke-width:1.6;stroke-dasharray:9 3 2 3",
        "stroke:#f0803c",
    ),
    ("dashed", "stroke-dasharray:6 5", ""),
    ("apart", "stroke-dasharray:11 11;stroke-linecap:butt", ""),
    ("dot", "fill:currentColor;stroke:#ffffff;stroke-width:1.4", "stroke:#0d1117"),
    ("whisker", "fill:none;stroke:currentColor;stroke-width:1.5", ""),
    ("bar", "fill:currentColor;stroke:currentColor;stroke-width:1.6", ""),
    ("hollow", "fill:#ffffff", "fill:#0d1117"),
    ("error", "fill:none;stroke:#1f2328;stroke-width:1.5", "stroke:#e6edf3"),
    ("axis", "stroke:#59636e", "stroke:#9198a1"),
    ("strong", "font-weight:600", ""),
    ("title", f"font-weight:600;font-size:{TITLE:g}px", ""),
    ("middle", "text-anchor:middle", ""),
    ("end", "text-anchor:end", ""),
    ("label", f"font-size:{LABEL:g}px", ""),
)
_FONT = f"font:{FONT_SIZE:g}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;pointer-events:none"


# The heads of arrows: class, and size in pixels.
HEADS = {"head": ("head", 6.0), "move": ("head-move", 9.0), "along": ("head-along", 8.0)}


def light(classes: str) -> dict[str, str]:
    """Return the style of an element of these classes in light colours.

    As in CSS, later rules take precedence, and more specific ones even more.

    >>> light("line wait")["stroke-width"], light("copy critical thin")["stroke-width"]
    ('1', '.6')
    """
    mine = set(classes.split())
    rules = [
        (len(style[0].split(".")), style[1])
        for style in _STYLES
        if mine.issuperset(style[0].split("."))
    ]
    found: dict[str, str] = {}
    for _, look in sorted(rules, key=lambda rule: rule[0]):
        found.update(
            (name, value) for name, _, value in (item.partition(":") for item in look.split(";"))
        )
    return found


def _rules(column: int) -> str:
    return "\n".join(
        f".autosched .{style[0]}{{{style[column]}}}" for style in _STYLES if style[column]
    )


def _head(name: str) -> str:
    cls, size = HEADS[name]
    return (
        f'<marker id="autosched-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size:g}" '
        f'markerHeight="{size:g}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="{cls}" d="M0 .5 8 4 0 7.5z"/></marker>'
    )


_HEADS = "\n".join(map(_head, HEADS))
_PREAMBLE = f"""<style>
.autosched{{max-width:100%;height:auto}}
.autosched text{{{_FONT}}}
{_rules(1)}
@media (prefers-color-scheme:dark){{
{_rules(2)}
}}
</style>
<defs>
<pattern id="autosched-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect class="ground" width="6" height="6"/><rect class="stripe" width="2.5" height="6"/></pattern>
{_HEADS}
</defs>"""


def document(width: float, height: float, label: str, body: Iterable[str]) -> str:
    """Return an SVG document with the styles of the classes in ``body``.

    ``label`` is for screen readers.
    """
    size = f"{number(width)} {number(height)}"
    attributes = f'viewBox="0 0 {size}" width="{number(width)}" height="{number(height)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="autosched" role="img" aria-label="{escape(label)}"'
    paper = f'<rect class="paper" width="{number(width)}" height="{number(height)}" rx="6"/>'
    return "\n".join([f"{opening} {attributes}>", _PREAMBLE, paper, *body, "</svg>"]) + "\n"


def legend(x: float, y: float, entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Draw (symbol, class, text) around height ``y``: box, pill, band, stack of boxes, or line."""
    drawn = []
    for symbol, cls, text in entries:
        if symbol == "line":
            drawn.append(f'<path class="{cls}" d="M{number(x)} {number(y)}h22"/>')
        else:
            rx = {"pill": 6, "band": 0}.get(symbol, 2)
            for shift in (3, 0) if symbol == "stack" else (0,):
                place = f'x="{number(x + shift)}" y="{number(y - 6 + shift)}"'
                drawn.append(f'<rect class="{cls}" {place} width="22" height="12" rx="{rx}"/>')
        drawn.append(
            f'<text class="muted" x="{number(x + 28)}" y="{number(y + 4)}">{escape(text)}</text>'
        )
        x += 28 + text_width(text) + 18
    return drawn


def legend_width(entries: Iterable[tuple[str, str, str]]) -> float:
    """Return the width of a ``legend``."""
    return sum(28 + text_width(text) + 18 for _, _, text in entries)


def escape(text: str) -> str:
    """Escape a string for XML text and attributes.

    Characters that XML 1.0 forbids become U+FFFD.

    >>> escape("a<b & 'c'")
    'a&lt;b &amp; &#39;c&#39;'
    """
    text = legal(text)
    for character, entity in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ('"', "&quot;"),
        ("'", "&#39;"),
    ):
        text = text.replace(character, entity)
    return text


def legal(text: str) -> str:
    """Replace characters that no text file may contain by U+FFFD."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def number(value: float) -> str:
    """Return a coordinate to a hundredth of a pixel, without trailing zeros.

    >>> number(12.0), number(0.123), number(-0.001)
    ('12', '0.12', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def natural(name: str) -> list[str | int]:
    """Return a key for natural sorting of names.

    >>> sorted(["cuda:10", "cuda:9", "cpu"], key=natural)
    ['cpu', 'cuda:9', 'cuda:10']
    """
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def sorted_streams(timeline: Timeline) -> list[Stream]:
    """Return the streams in the order of charts: by the names of devices."""
    return sorted(timeline.streams, key=lambda stream: natural(stream.device))


def columns(text: str) -> int:
    """Return the columns of a text: 2 for wide characters, 0 for combining ones."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the approximate width of a text in pixels."""
    return columns(text) * _EM * size


def shorten(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Cut a text to ``width`` pixels, with an ellipsis; return "" where too little would remain.

    >>> shorten("logits", 60), shorten("gradient_of_w1", 60), shorten("logits", 20)
    ('logits', 'gradien…', '')
    """
    room = int(width / (_EM * size))
    if columns(text) <= room:
        return text
    if room < 6:
        return ""
    kept = text[: room - 1]
    while columns(kept) >= room:
        kept = kept[:-1]
    return kept + "…"


def shorten_path(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Cut a text as ``shorten`` does, but cut the beginning of a dotted path, not its end.

    >>> shorten_path("encoder.layers.0.attention", 110), shorten_path("gradient_of_w1", 60)
    ('…0.attention', 'gradien…')
    """
    room = int(width / (_EM * size))
    if columns(text) <= room:
        return text
    dots = [at for at, character in enumerate(text) if character == "."]
    fitting = [text[at + 1 :] for at in dots if columns(text[at:]) <= room]
    return f"…{fitting[0]}" if fitting and room >= 6 else shorten(text, width, size)


def ticks(end: float, most: int) -> list[tuple[float, str]]:
    """Return at most ``most`` steps of round times from 0 to ``end`` seconds, each with its text.

    >>> ticks(0.0021, 5)
    [(0.0, '0'), (0.0005, '0.5 ms'), (0.001, '1 ms'), (0.0015, '1.5 ms'), (0.002, '2 ms')]
    """
    if end < 1e-12:
        return [(0.0, "0")]
    least = end / max(most, 1)
    power = math.floor(math.log10(least))
    step = next(s for s in (float(f"{digit}e{power}") for digit in (1, 2, 5, 10)) if s >= least)
    scale, unit = time_unit(end)
    times = (float(f"{i * step:.12g}") for i in range(math.floor(end / step + 1e-9) + 1))
    return [(time, f"{time / scale:g} {unit}" if time else "0") for time in times]


def idle_shares(timeline: Timeline) -> dict[Stream, float]:
    """Return the share of the makespan in which each stream is idle.

    >>> from autosched.timeline.timeline import Span
    >>> cpu, gpu = Stream("cpu", "compute"), Stream("cuda:0", "compute")
    >>> idle_shares(Timeline((Span("run", "a", (cpu,), 0, 3, 0), Span("run", "b", (gpu,), 3, 4, 1))))
    {Stream(device='cpu', name='compute'): 0.25, Stream(device='cuda:0', name='compute'): 0.75}
    """
    busy = dict.fromkeys(timeline.streams, 0.0)
    for span in timeline.spans:
        for stream in span.streams:
            busy[stream] += span.seconds
    whole = timeline.makespan or 1.0
    return {stream: max(1 - seconds / whole, 0.0) for stream, seconds in busy.items()}


def summary(timeline: Timeline) -> str:
    """Return a line with makespan, share of copy time that is hidden, and pauses of Python.

    >>> summary(Timeline(())), summary(Timeline((), pauses=((0.1, 0.102),)))
    ('makespan 0 us', 'makespan 0 us, garbage collected for 2 ms')
    """
    text = f"makespan {duration(timeline.makespan)}"
    if any(span.kind == "copy" for span in timeline.spans):
        text += f", {timeline.overlap().copies_hidden:.0%} of copy time hidden behind compute"
    if timeline.pauses:
        text += f", garbage collected for {duration(sum(end - start for start, end in timeline.pauses))}"
    return text
