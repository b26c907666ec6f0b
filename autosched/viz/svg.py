"""Provide the styles, elements and texts of SVG drawings, and estimate how wide texts are.

Colours are from Okabe and Ito, "Color Universal Design" (2008), and can be distinguished with every
kind of colour blindness. Copies between devices are hatched as well, so that drawings can be read
without colour. Knows no graph and no program.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable

FONT_SIZE = 12.0
EM = 0.58  # average width of a character, in font sizes, for the wider of usual fonts
LABEL = 10.5  # the size of text in narrow boxes
TITLE = 17.0
PHASES = ("backward", "optimizer")  # of tasks: these have colours of their own, as on the page

# Colours of series, light and dark: blue, vermilion, green, purple, sky blue, orange.
SERIES = (
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#f0803c"),
    ("#009e73", "#2bc08f"),
    ("#b8629a", "#dd94bd"),
    ("#56b4e9", "#f0e442"),
    ("#e69f00", "#e69f00"),
)

# Class | its style in light colours | what differs in dark ones. Later lines take precedence.
_STYLES = [
    [cell.strip() for cell in line.split("|")]
    for line in f"""
paper         | fill:#ffffff | fill:#0d1117
ink           | fill:#1f2328 | fill:#e6edf3
muted         | fill:#59636e | fill:#9198a1
track         | fill:#f3f5f8 | fill:#171c24
grid          | stroke:#d9dee4 | stroke:#2d343d
task          | fill:#0072b2;stroke:#ffffff | fill:#56b4e9;stroke:#0d1117
backward      | fill:#009e73;stroke:#ffffff | fill:#2bc08f;stroke:#0d1117
optimizer     | fill:#b8629a;stroke:#ffffff | fill:#dd94bd;stroke:#0d1117
view          | fill:#ffffff;stroke:#0072b2 | fill:#0d1117;stroke:#56b4e9
input         | fill:#ffffff;stroke:#59636e | fill:#0d1117;stroke:#9198a1
copy          | fill:url(#autosched-hatch);stroke:#ffffff | stroke:#0d1117
odd           | fill-opacity:.4 |
ground        | fill:#f3bf4f | fill:#e69f00
stripe        | fill:#e69f00 | fill:#b87f00
thin          | stroke:none | stroke:none
critical      | stroke:#1f2328;stroke-width:2 | stroke:#ffffff
critical.thin | stroke:#1f2328;stroke-width:.6 | stroke:#ffffff
on-task       | fill:#ffffff | fill:#0d1117
on-copy|fill:#1f2328;stroke:#f3bf4f;stroke-width:3;paint-order:stroke|fill:#0d1117;stroke:#e69f00
line|fill:none;stroke:#59636e;stroke-width:1.2;marker-end:url(#autosched-head)|stroke:#9198a1
wait          | stroke-width:1 |
order         | stroke-dasharray:5 3 |
anti          | stroke-dasharray:1.5 3 |
move          | stroke:#e69f00;stroke-width:2.4;marker-end:url(#autosched-move) | stroke:#e69f00
faint         | stroke-width:.7;opacity:.55 |
halo          | stroke:#ffffff;stroke-width:4;paint-order:stroke | stroke:#0d1117
period        | fill:none;stroke:#1f2328;stroke-width:1.2 | stroke:#e6edf3
frame         | fill:none;stroke:#59636e;stroke-width:.8 | stroke:#9198a1
head          | fill:#59636e | fill:#9198a1
head-move     | fill:#e69f00 |
strong        | font-weight:600 |
title         | font-weight:600;font-size:{TITLE:g}px |
middle        | text-anchor:middle |
end           | text-anchor:end |
label         | font-size:{LABEL:g}px |
""".strip().splitlines()
]
# DejaVu Sans is the font of PNG and PDF.
_FONT = (
    f"{FONT_SIZE:g}px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif"
)


def color(name: str, dark: bool = False) -> str:
    """Return the colour of a class.

    >>> color("ink"), color("grid", dark=True)
    ('#1f2328', '#2d343d')
    """
    style = next(style for style in _STYLES if style[0] == name)
    return str(re.findall("#[0-9a-f]{6}", style[1 + dark])[0])


def _rules(column: int) -> str:
    styles = ((style[0], style[column]) for style in _STYLES)
    return "\n".join(f".autosched .{name}{{{look}}}" for name, look in styles if look)


def _arrow_head(name: str, cls: str, size: int) -> str:
    return (
        f'<marker id="autosched-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" '
        f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="{cls}" d="M0 .5 8 4 0 7.5z"/></marker>'
    )


PREAMBLE = f"""<style>
.autosched{{max-width:100%;height:auto}}
.autosched text{{font:{_FONT};pointer-events:none}}
{_rules(1)}
@media (prefers-color-scheme:dark){{
{_rules(2)}
}}
</style>
<defs>
<pattern id="autosched-hatch" width="6" height="6" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)">\
<rect class="ground" width="6" height="6"/><rect class="stripe" width="2.5" height="6"/></pattern>
{_arrow_head("head", "head", 6)}
{_arrow_head("move", "head-move", 9)}
</defs>"""


def document(
    width: float, height: float, label: str, body: Iterable[str], zoom: float = 1.0
) -> str:
    """Return an SVG document with these elements; ``label`` is for screen readers."""
    size = f'width="{number(zoom * width)}" height="{number(zoom * height)}"'
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" class="autosched" role="img" '
        f'aria-label="{escape(label)}" viewBox="0 0 {number(width)} {number(height)}" {size}>'
    )
    paper = rect("paper", 0, 0, width, height, 6)
    return "\n".join([opening, PREAMBLE, paper, *body, "</svg>"]) + "\n"


# ---- elements


def rect(
    cls: str, x: float, y: float, width: float, height: float, rx: float = 0, tooltip: str = ""
) -> str:
    """Return a box with round corners."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    inner = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return f'<rect class="{cls}" {place} rx="{number(rx)}">{inner}</rect>'


def text(cls: str, x: float, y: float, content: str, rotated: bool = False) -> str:
    """Return a line of text; ``rotated``, it runs upwards."""
    turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if rotated else ""
    return f'<text class="{cls}" x="{number(x)}" y="{number(y)}"{turn}>{escape(content)}</text>'


def path(cls: str, *parts: str | float) -> str:
    """Return a path of commands and coordinates.

    >>> path("grid", "M", 1, 2.5, "H", 3)
    '<path class="grid" d="M1 2.5H3"/>'
    """
    data = ""
    space = ""
    for part in parts:
        data += part if isinstance(part, str) else space + number(part)
        space = "" if isinstance(part, str) else " "
    return f'<path class="{cls}" d="{data}"/>'


def legend(x: float, y: float, entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Draw (symbol, class, text) around height ``y``: box, pill, stack of boxes, or line."""
    drawn = []
    for symbol, cls, name in entries:
        if symbol == "line":
            drawn.append(path(cls, "M", x, y, "h", 22))
        else:
            rx = 6 if symbol == "pill" else 2
            for shift in (3, 0) if symbol == "stack" else (0,):
                drawn.append(rect(cls, x + shift, y - 6 + shift, 22, 12, rx))
        drawn.append(text("muted", x + 28, y + 4, name))
        x += 28 + text_width(name) + 18
    return drawn


def legend_width(entries: Iterable[tuple[str, str, str]]) -> float:
    """Return the width of a ``legend``."""
    return sum(28 + text_width(name) + 18 for _, _, name in entries)


def escape(text: str) -> str:
    """Escape a string for XML text and attributes.

    Characters that XML 1.0 forbids become U+FFFD.

    >>> escape("a<b & 'c'")
    'a&lt;b &amp; &#x27;c&#x27;'
    """
    return html.escape(legal(text))


def number(value: float) -> str:
    """Return a coordinate to a hundredth of a pixel, without trailing zeros.

    >>> number(12.0), number(0.123), number(-0.001)
    ('12', '0.12', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


# ---- texts


def legal(text: str) -> str:
    """Replace characters that no text file may contain by U+FFFD."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def columns(text: str) -> int:
    """Return the columns of a text: 2 for wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the approximate width of a text in pixels."""
    return columns(text) * EM * size


def shorten(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Cut a text to ``width`` pixels, with an ellipsis; return "" where too little would remain.

    A short last part of a name remains, such as a number, since it often makes the difference.

    >>> shorten("logits", 60), shorten("gradient", 52), shorten("getitem_12", 60), shorten("w", 2)
    ('logits', 'gradie…', 'geti…_12', '')
    """
    limit = int(width / (EM * size))
    if columns(text) <= limit:
        return text
    if limit < 6:
        return ""
    last = re.search(r"[._][A-Za-z0-9]{1,3}$", text)
    end = last[0] if last else ""
    start = text[: limit - 1 - len(end)]
    while columns(start) + len(end) >= limit:
        start = start[:-1]
    return f"{start}…{end}"


def shorten_path(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Cut a text as ``shorten`` does, but cut the beginning of a dotted path, not its end.

    >>> shorten_path("encoder.layers.0.attention", 110), shorten_path("gradient_of_w1", 60)
    ('…0.attention', 'grad…_w1')
    """
    limit = int(width / (EM * size))
    if columns(text) <= limit:
        return text
    dots = [at for at, character in enumerate(text) if character == "."]
    fitting = [text[at + 1 :] for at in dots if columns(text[at:]) <= limit]
    return f"…{fitting[0]}" if fitting and limit >= 6 else shorten(text, width, size)
