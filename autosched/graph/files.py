"""Describe tensors in files, and read them.

A ``StoredTensor`` knows where in a file the bytes of a tensor are. It is the function of the tasks
that ``Graph.read`` adds. Called, it returns the tensor; on a storage device a task returns it as it
is, and the copy from there to host memory reads the file.

Files of safetensors begin with the number of bytes of a JSON header, which has dtype, shape and
position of each tensor. It is read here, because the library of that name does not tell positions,
which reading into page-locked memory needs. Nothing is mapped into memory: a page fault would stop
the thread that computes, and hold its interpreter lock.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from io import RawIOBase
from types import NoneType
from typing import TYPE_CHECKING, Any

from autosched._lib.allowed import is_storage, is_whole
from autosched.errors import GraphError, StorageError, listed, shown
from autosched.graph.task import STORAGE
from autosched.graph.value import Value

if TYPE_CHECKING:
    from autosched.graph.graph import Graph

_SUFFIX = ".safetensors"
_LENGTH = 8  # bytes of the number at the beginning
# By the names in headers: dtype of torch, and bytes of an element.
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_SIZES = dict(_DTYPES.values())


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its dtype and shape, and the position of its first byte.

    ``size`` is the size of the file when the graph was made; ``header``, the number of bytes with
    which it began, and their checksum.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    header: tuple[int, int] = (0, 0)

    __name__ = "read"

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * _SIZES[self.dtype]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} in {os.path.basename(self.path)}"

    def __call__(self) -> Any:
        """Return the tensor."""
        return self.read()

    def read(self, pinned: bool = False) -> Any:
        """Return the tensor, in page-locked memory if ``pinned``. Raises StorageError."""
        import torch

        memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        if self.nbytes:
            self._fill(memory.numpy().data)
        return memory.view(getattr(torch, self.dtype)).view(self.shape)

    def empty(self) -> Any:
        """Return a tensor of this dtype and shape, with any contents."""
        import torch

        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))

    def _fill(self, memory: memoryview) -> None:
        """Read the bytes from the file; other threads run meanwhile."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != self.size:
                    raise StorageError(
                        f"file {self.path!r} has {size:,} B, and had {self.size:,} B when the "
                        "graph was made; make the graph again"
                    )
                count, checksum = self.header
                begin = bytearray(count)
                self._read(file, 0, memoryview(begin))
                if zlib.crc32(begin) != checksum:
                    raise StorageError(
                        f"file {self.path!r} has another header than when the graph was made; make "
                        "the graph again"
                    )
                self._read(file, self.offset, memory)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def _read(self, file: RawIOBase, offset: int, memory: memoryview) -> None:
        file.seek(offset)
        while memory:
            count = file.readinto(memory)
            if not count:
                raise StorageError(f"file {self.path!r} ended while it was read")
            memory = memory[count:]


def read(
    graph: Graph,
    path: str | os.PathLike[str],
    tensor: str | Iterable[str] | None = None,
    *,
    prefix: str = "",
    on: str | None = None,
) -> Any:
    """Add tasks that read tensors from a file ``*.safetensors``, and return their Values.

    These are the ``tensor`` of that name, or a dict of several by name (default: all).
    ``prefix`` precedes names. Each run reads the file again, from the storage device ``on`` (default: the
    machine's first), at the same time as other devices work. Without one, the host reads. A
    task may write such a value; the file stays. Raises StorageError for a file that is missing
    or malformed, GraphError for unknown tensors.
    """
    if on is not None and not (isinstance(on, str) and is_storage(on)):
        raise GraphError(f"on= of graph.read is a storage device, such as 'disk:0', got {on!r}")
    try:
        where = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise GraphError(
            f"the path of a file must be a string or a Path, got {shown(path)}"
        ) from None
    if not where.endswith(_SUFFIX):
        raise GraphError(f"file {where!r} is not named *{_SUFFIX}, and only such files are read")
    stored = _stored(where)
    if isinstance(tensor, str):
        return _add(graph, prefix + tensor, _named(where, stored, tensor), on)
    if not isinstance(tensor, Iterable | NoneType):
        raise GraphError(f"tensor= must be a name, or several in a list, got {shown(tensor)}")
    names = list(stored) if tensor is None else list(tensor)
    parts = {name: _named(where, stored, name) for name in names}
    return {name: _add(graph, prefix + name, part, on) for name, part in parts.items()}


def _add(graph: Graph, name: str, stored: StoredTensor, on: str | None) -> Value:
    label = graph.fresh(re.sub(r"[\s@]", "_", name))
    place = on or STORAGE
    value: Value = graph.add_task(stored, (), {}, name=label, on=place, nbytes=stored.nbytes)
    return value


# ---- safetensors


def _size(path: str) -> int:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise StorageError(f"file {path!r} cannot be read: it is {kind}")
    return found.st_size


def _unreadable(path: str, error: OSError | ValueError) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StorageError(f"file {path!r} cannot be read: {getattr(error, 'strerror', error)}")


def _stored(path: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file of safetensors, in the order of their positions."""
    size = _size(path)
    try:
        with open(path, "rb") as file:
            begin = file.read(_LENGTH)
            count = int.from_bytes(begin, "little")
            if not 0 < count <= size - _LENGTH:
                raise StorageError(f"file {path!r} does not begin with a header of safetensors")
            text = file.read(count)
    except OSError as error:
        raise _unreadable(path, error) from error
    data = _LENGTH + count
    whole = StoredTensor(
        path, "uint8", (size - data,), data, size, (data, zlib.crc32(begin + text))
    )
    try:
        header = json.loads(text)
        entries = [(name, item) for name, item in header.items() if name != "__metadata__"]
        entries.sort(key=lambda entry: entry[1]["data_offsets"])
        return {name: _entry(whole, item) for name, item in entries}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise StorageError(f"file {path!r} has a malformed header: {error!r}") from error


def _entry(whole: StoredTensor, item: Mapping[str, Any]) -> StoredTensor:
    """Return a tensor of the header; ``whole`` are the bytes of all. Raises ValueError."""
    begin, end = item["data_offsets"]
    shape = tuple(item["shape"])
    if not all(is_whole(number) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("shapes and offsets are whole numbers, 0 or more")
    dtype = _DTYPES[item["dtype"]][0]
    found = replace(whole, dtype=dtype, shape=shape, offset=whole.offset + begin)
    if end - begin != found.nbytes or end > whole.nbytes:
        raise ValueError(f"{found.dtype}{list(shape)} at {begin} to {end} of {whole.nbytes} B")
    return found


def _named(path: str, stored: Mapping[str, StoredTensor], name: Any) -> StoredTensor:
    if not isinstance(name, str) or name not in stored:
        close = get_close_matches(str(name), stored)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?"
            if close
            else f"it has {listed(stored)}"
        )
        raise GraphError(f"file {path!r} has no tensor {name!r}; {hint}")
    return stored[name]
