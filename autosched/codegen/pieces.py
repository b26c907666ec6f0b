"""Break source text into lines of at most 120 columns.

A piece of text records where it may be broken. Knows brackets and commas, and not their meaning.
Lines are broken as ruff and black do: the content of brackets on a line of its own, or else each
item on a line.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["WIDTH", "Piece", "bracketed", "laid_out", "quoted"]

WIDTH = 120
_STEP = 4


class Piece(NamedTuple):
    """Items between brackets, or a text without items, in ``before``.

    Without ``after`` it gets brackets where it is broken.

    >>> str(Piece("torch.add(", (Piece("x"), Piece("y")), ")").prefixed("z = "))
    'z = torch.add(x, y)'
    """

    before: str
    items: tuple[Piece, ...] = ()
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}{', '.join(map(str, self.items))}{self.after}"

    def prefixed(self, text: str) -> Piece:
        """Return this piece with a text before it."""
        return Piece(text + self.before, self.items, self.after)


def laid_out(piece: Piece, indent: int, tail: int = 0) -> str:
    """Return a piece that begins at column ``indent``, in one line or several.

    It is followed by ``tail`` characters.

    >>> call = Piece("f(", (Piece("x" * 70), Piece("y" * 70)), ")")
    >>> [len(line) for line in laid_out(call, 0).splitlines()]
    [2, 75, 75, 1]
    """
    flat = str(piece)
    if not piece.items or indent + len(flat) + tail <= WIDTH:
        return flat
    inner = indent + _STEP
    opening, closing = piece.before, piece.after.lstrip(",")
    if not piece.after:
        opening, closing = f"{piece.before}(", ")"
    comma = "," if piece.after or len(piece.items) > 1 else ""
    lines = [", ".join(map(str, piece.items)) + "," * piece.after.startswith(",")]
    if inner + len(lines[0]) > WIDTH:
        lines = [laid_out(item, inner, 1) + comma for item in piece.items]
    return "\n".join([opening, *(" " * inner + line for line in lines), " " * indent + closing])


def bracketed(name: str, brackets: str, items: list[Piece]) -> Piece:
    """Return items in brackets after a name; a tuple of one item has a comma."""
    comma = "," if brackets == "()" and not name and len(items) == 1 else ""
    return Piece(name + brackets[0], tuple(items), comma + brackets[1:])


def quoted(text: str | bytes) -> str:
    r"""Return a string as source, in double quotes where they need no escape.

    >>> quoted("y"), quoted('"')
    ('"y"', '\'"\'')
    """
    written = repr(text)
    mark, inner = ("b", written[2:-1]) if isinstance(text, bytes) else ("", written[1:-1])
    return written if '"' in inner or "'" in inner else f'{mark}"{inner}"'
