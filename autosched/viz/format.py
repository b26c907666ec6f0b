"""Format names, times and widths of text for all drawings. Knows no graph and no program."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

from autosched._lib.text import duration, time_unit
from autosched.program.program import Stream
from autosched.timeline.timeline import Timeline

FONT_SIZE = 12.0
Steps = Sequence[tuple[float, float]]  # (seconds, amount from then on), in the order of time

EM = 0.58  # average width of a character, in font sizes, for the wider of usual fonts


def legal(text: str) -> str:
    """Replace characters that no text file may contain by U+FFFD."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def natural(name: str) -> list[str | int]:
    """Return a key for natural sorting of names.

    >>> sorted(["cuda:10", "cuda:9", "cpu"], key=natural)
    ['cpu', 'cuda:9', 'cuda:10']
    """
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def sorted_streams(timeline: Timeline) -> list[Stream]:
    """Return the streams in the order of charts: by hosts, then by the names of devices."""
    hosts = timeline.hosts
    return sorted(
        timeline.streams,
        key=lambda stream: (natural(hosts.get(stream.device, "")), natural(stream.device)),
    )


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


def summary(timeline: Timeline) -> str:
    """Return a line with makespan, share of hidden copy time, and doubt.

    >>> summary(Timeline(())), summary(Timeline((), doubt=1e-5))
    ('makespan 0 us', 'makespan 0 us, clocks agree within 10 us')
    """
    text = f"makespan {duration(timeline.makespan)}"
    if timeline.run_count > 1:
        text = f"{timeline.run_count} runs in {duration(timeline.makespan)}"
    if timeline.period is not None:
        text += f", period {duration(timeline.period)}"
    if any(span.kind == "copy" for span in timeline.spans):
        text += f", {timeline.overlap().copies_hidden:.0%} of copy time hidden behind compute"
    if timeline.doubt:
        text += f", clocks agree within {duration(timeline.doubt)}"
    return f"{text}, with {timeline.guess}" if timeline.guess else text
