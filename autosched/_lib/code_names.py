"""Find the names that a function's code mentions: globals, attributes and imports."""

from __future__ import annotations

import dis
import functools
from types import CodeType
from typing import NamedTuple


class Names(NamedTuple):
    """The globals, attributes (also strings) and imports that code names."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imports: tuple[str, ...]


@functools.lru_cache(maxsize=10_000)
def names_in(code: CodeType, written: bool = True) -> Names:
    """Return the names in code, and in the code of functions and classes within it.

    Without ``written``, names that are only stored are left out. What a class body stores are its
    attributes; what it loads may be a global.

    >>> names_in((lambda x: max(x.real, default).imag).__code__)
    Names(globals=('max', 'default'), attributes=('real', 'imag'), imports=())
    """
    found = {kind: dict[str, None]() for kind in ("global", "attribute", "import")}
    codes = [code]
    while codes:
        inner = codes.pop()
        for item in inner.co_consts:
            if isinstance(item, CodeType):
                codes.append(item)
            elif isinstance(item, str) and item.isidentifier():
                found["attribute"][item] = None
        for instruction in dis.get_instructions(inner):
            action, _, kind = instruction.opname.partition("_")
            loads = action in ("LOAD", "IMPORT")
            if kind == "NAME" and action in _BY_ACTION:
                found[_BY_ACTION[action]][instruction.argval] = None
            elif kind in _BY_KIND and (loads or written):
                found[_BY_KIND[kind]][instruction.argval] = None
    return Names(*map(tuple, found.values()))


_BY_ACTION = {"LOAD": "global", "IMPORT": "import"}  # of instructions on a NAME
_BY_KIND = {
    **dict.fromkeys(("GLOBAL", "FROM_DICT_OR_GLOBALS"), "global"),
    **dict.fromkeys(("ATTR", "METHOD", "SUPER_ATTR", "FROM"), "attribute"),
}
