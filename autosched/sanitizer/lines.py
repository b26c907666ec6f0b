"""Where the user's code is, and what it calls tensors and streams.

Lines are those of frames outside torch and this package. Names are searched in the variables of
these frames, in their lists, dictionaries and attributes, and in modules.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from autosched.sanitizer.findings import Line

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = sysconfig.get_paths()["purelib"] + os.sep
_MAIN = threading.main_thread()
_MOST_LINES = 3
_WITHOUT_TENSORS = (type, FunctionType, ModuleType)
_MOST_FRAMES = 8  # in which names are searched


def _is_ours(file: str) -> bool:
    wraps = file.startswith((_TORCH, "<frozen")) or file.endswith("typing_extensions.py")
    skipped = wraps or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))
    return skipped or (file.startswith(_PACKAGE) and not file.endswith("demo.py"))


def frames() -> Iterator[FrameType]:
    """Yield the user's frames, the innermost first; of a thread without any, those of the main thread."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame.f_code.co_filename):
            found = frame
            yield frame
        frame = frame.f_back
        if frame is None and found is None and threading.current_thread() is not _MAIN:
            found = frame = sys._current_frames().get(_MAIN.ident or 0)


def lines() -> tuple[Line, ...]:
    """Return the user's innermost lines; those of installed packages only within the user's own."""
    found: list[Line] = []
    own = 0
    for frame in frames():
        code = frame.f_code
        is_own = not code.co_filename.startswith(_INSTALLED)
        if is_own or (not own and len(found) < _MOST_LINES):
            found.append(Line(code.co_filename, frame.f_lineno, code.co_name))
        own += is_own
        if own == _MOST_LINES or (is_own and code.co_name == "<module>"):
            break
    return tuple(found)


def compiled_call(error: BaseException) -> str:
    """Return the user's name of a compiled function, neither Python's nor torch's, that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    *_, place = traceback.extract_tb(error.__traceback__)
    if _is_ours(place.filename):
        return ""
    line = linecache.getline(place.filename, place.lineno or 0)
    found = re.match(r"[\w.]+(?=\()", line[place.colno or 0 :])
    first, *others = found[0].split(".") if found else ("",)
    item = {**frame.f_globals, **_variables(frame)}.get(first)
    for name in others:
        item = getattr(item, name, None)
    home = str(getattr(item, "__module__", "") or "").partition(".")[0]
    is_others = home and home not in {*sys.stdlib_module_names, "torch", "numpy"}
    is_compiled = callable(item) and not isinstance(item, (FunctionType, MethodType, type))
    return found[0] if found and is_others and is_compiled else ""


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame, and let it forget that it was asked.

    A frame keeps what it answers, and so would keep tensors that the user deletes.
    """
    known = frame.f_locals
    found = dict(known)
    if type(known) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        known.clear()
    return found


def tensor_names(is_it: Any) -> tuple[str, ...]:
    """Return what the user's frames call a tensor for which a function is true."""
    found: dict[str, None] = {}
    chosen = [frame for _, frame in zip(range(_MOST_FRAMES), frames(), strict=False)]
    for frame in sorted(chosen, key=lambda each: each.f_code.co_filename.startswith(_INSTALLED)):
        for name, item in _variables(frame).items():
            found.update(dict.fromkeys(_within(name, item, is_it, 2)))
    return tuple(found)


def _within(name: str, item: Any, is_it: Any, depth: int) -> Iterator[str]:
    if isinstance(item, torch.Tensor):
        if is_it(item):
            yield name
        elif item.is_leaf and item.grad is not None and is_it(item.grad):
            yield f"{name}.grad"
    elif isinstance(item, torch.nn.Module):
        for part, parameter in [*item.named_parameters(), *item.named_buffers()]:
            yield from _within(f"{name}.{part}", parameter, is_it, 0)
    elif not depth:
        return
    elif isinstance(item, (list, tuple)):
        for i, part in enumerate(item[:64]):
            yield from _within(f"{name}[{i}]", part, is_it, depth - 1)
    elif isinstance(item, dict):
        for key, part in list(item.items())[:64]:
            text = repr(key) if isinstance(key, (int, str)) else "..."  # a tensor's would be work
            yield from _within(f"{name}[{text}]", part, is_it, depth - 1)
    elif not isinstance(item, _WITHOUT_TENSORS):
        for key, part in list(_attributes(item).items())[:64]:
            yield from _within(f"{name}.{key}", part, is_it, depth - 1)


def _attributes(item: Any) -> dict[str, Any]:
    """Return the attributes of an object; none of what refuses to tell."""
    try:
        return dict(vars(item))
    except Exception:
        return {}


def variable(is_it: Any) -> str:
    """Return the user's variable, or attribute, that holds an object; nothing if there is none."""
    for _, frame in zip(range(_MOST_FRAMES), frames(), strict=False):
        own = _variables(frame)
        for name, item in [*own.items(), *list(frame.f_globals.items())]:
            if is_it(item):
                return str(name)
        for name, item in _attributes(own.get("self")).items():
            if is_it(item):
                return f"self.{name}"
    return ""
