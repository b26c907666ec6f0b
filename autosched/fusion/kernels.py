"""Compile the C++ kernels of a region together, and call them without the GIL.

Inductor calls the compiler for each kernel, and half of that time is spent on its headers. Here the
kernels of a region are as many sources as Inductor has threads for compilers, of about equal
length. In a source each kernel has a namespace, and a name by which Python finds its module.

Kernels take numbers that are read from tensors in double precision, as eager mode does; Inductor
would round them to single precision.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

__all__ = ["batched_kernels"]

# How Python calls a kernel: as Inductor does, but other threads can run Python meanwhile.
_CALL = """
auto arguments = std::make_tuple({arguments});
struct Released {{
    PyThreadState* state = PyEval_SaveThread();
    ~Released() {{ PyEval_RestoreThread(state); }}
}};
{{ Released released; std::apply({name}, arguments); }}
Py_RETURN_NONE;
"""
_NAME = re.compile(r"\bkernel\b")  # what Inductor names each C++ function for Python
_NUMBER = re.compile(r"\bconst float (?=ks\d)")  # how Inductor declares a number read from a tensor
_INCLUDE = re.compile(r"^\s*#include .*", re.MULTILINE)

Function = Callable[..., Any]


@contextlib.contextmanager
def batched_kernels() -> Iterator[None]:
    """Let Inductor compile the C++ kernels of each module that it generates in few batches."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import LambdaFuture

    modules: dict[AsyncCompile, _Module] = {}

    def add(self: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        kernel = _Kernel(argtypes, source_code)
        if get_compile_threads() <= 1:  # the module waits for nothing
            return _compiled([kernel])()[0]
        module = modules.setdefault(self, _Module())
        number = module.add(kernel)
        return LambdaFuture(lambda: module.functions(get_compile_threads())[number])

    with mock.patch.object(AsyncCompile, "cpp_pybinding", add):
        yield


class _Kernel(NamedTuple):
    """The types of a kernel's arguments in C++, and its source."""

    argtypes: Sequence[str]
    source: str


class _Module:
    """The kernels of a module; all are compiled when one of them is needed."""

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._functions: list[Function] = []

    def add(self, kernel: _Kernel) -> int:
        """Return the position of a new kernel."""
        self._kernels.append(kernel)
        return len(self._kernels) - 1

    def functions(self, batches: int) -> list[Function]:
        """Return the compiled kernels."""
        if not self._functions:
            parts = _parts([len(kernel.source) for kernel in self._kernels], batches)
            started = [_compiled([self._kernels[i] for i in part]) for part in parts]
            made = [
                zip(part, wait(), strict=True) for part, wait in zip(parts, started, strict=True)
            ]
            found = dict(pair for pairs in made for pair in pairs)
            self._functions = [found[i] for i in range(len(self._kernels))]
        return self._functions


def _parts(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the positions of sources in at most ``count`` parts of about equal length.

    >>> _parts([2, 9, 3, 4], 2)
    [[1], [3, 2, 0]]
    """
    parts: list[list[int]] = [[] for _ in range(min(count, len(lengths)))]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(parts, key=lambda part: sum(lengths[j] for j in part)).append(i)
    return parts


def _compiled(kernels: Sequence[_Kernel]) -> Callable[[], list[Function]]:
    """Start to compile kernels in one source; return a function that waits for them."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    names = [f"kernel{i}" for i in range(len(kernels))]
    texts = list(map(_with_bindings, kernels, names))
    includes = dict.fromkeys(found for text in texts for found in _INCLUDE.findall(text))
    spaces = (
        f"namespace of_{name} {{\n{text}\n}}" for name, text in zip(names, texts, strict=True)
    )
    # Each name has a module in one library; the class, which loads the first, says its name.
    loaders: list[Any] = [type(name, (Bindings,), {"entry_function": name}) for name in names]
    # Without threads, ``submit`` compiles at once, and waits for a lock that its caller holds.
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    load = loaders[0].load_async("\n".join([*includes, *spaces]), submit_fn=submit)

    def wait() -> list[Function]:
        first = load()
        rest = (loader._load_library(first.__file__, first.key) for loader in loaders[1:])
        return list(map(getattr, [first, *rest], names))

    return wait


def _with_bindings(kernel: _Kernel, name: str) -> str:
    """Return the source of a kernel with this name, and of a module that calls it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    types = (argtype.replace("const ", "") for argtype in kernel.argtypes)
    exact = ("double" if each == "float" else each for each in types)  # others are pointers, sizes
    arguments = ", ".join(f"parse_arg<{each}>(args, {n})" for n, each in enumerate(exact))
    template = Bindings.suffix_template
    for single in ("float parse_arg<float>", "static_cast<float>"):
        template = template.replace(single, single.replace("float", "double"))
    source = _NUMBER.sub("const double ", _NAME.sub(name, kernel.source))
    return source + template.format(
        entry_func=name,
        arg_len=len(kernel.argtypes),
        call_entry_func=_CALL.format(name=name, arguments=arguments),
        extra_parse_arg="#include <tuple>",
    )
