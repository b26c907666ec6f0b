"""Choose unique Python identifiers for the names that users chose.

Knows Python's rules for names, and no graph.
"""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

_BUILTINS = frozenset(dir(builtins))
_NO_NAMES = frozenset(keyword.kwlist) | {"__debug__"}


class Names:
    """The names that are taken: in the module, in its function ``step``, or in both.

    >>> names = Names(module=["functools"], both=["torch"])
    >>> [names.variable(name) for name in ("torch", "h.0", "lambda", "sum")]
    ['torch_0', 'h_0', 'lambda_', 'sum_']
    """

    def __init__(self, module: list[str], both: list[str]):
        self._module = {*module, *both}
        self._step = set(both)

    def parameter(self, name: str) -> str:
        """Take a name in ``step`` that may shadow a builtin, such as ``input``."""
        found = _free(identifier(name), self._step)
        self._step.add(found)
        return found

    def variable(self, name: str) -> str:
        """Take a name in ``step``."""
        valid = identifier(name)
        return self.parameter(f"{valid}_" if valid in _BUILTINS else valid)

    def shared(self, name: str) -> str:
        """Take a name in the module that ``step`` uses."""
        found = _free(identifier(name), self._module | self._step)
        self._module.add(found)
        self._step.add(found)
        return found


def identifier(name: str) -> str:
    """Return the valid identifier that is most similar to a name.

    >>> identifier("conv1.weight"), identifier("2x"), identifier("class")
    ('conv1_weight', '_2x', 'class_')
    """
    valid = re.sub(r"\W", "_", unicodedata.normalize("NFKC", name))
    if not valid.isidentifier():
        valid = "_" + re.sub(r"\W", "_", valid, flags=re.ASCII)
    return f"{valid}_" if valid in _NO_NAMES else valid


def _free(name: str, taken: set[str]) -> str:
    number = 0
    found = name
    while found in taken:
        found = f"{name}_{number}"
        number = number + 1
    return found
