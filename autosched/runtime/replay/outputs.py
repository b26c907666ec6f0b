"""Return outputs that later replays do not overwrite.

An output that is an input, or a view of one, is returned as that input or a view of it, as in any
run. Of the recording's own memory the caller gets a copy, and outputs that share memory in the
recording share it in the copy. Compares addresses, and reads no element.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autosched._lib.copying import span
from autosched._lib.tree import flatten, transform

__all__ = ["Outputs", "is_strided"]

_ALIGNED = 16  # bytes: any dtype may begin there


class Outputs:
    """Returns copies of ``outputs``, by name, after each replay.

    ``lent`` are the inputs of the recorded run, ``lasting`` other memory that keeps its address.
    ``borrowed`` returns a tensor on the same memory that does not prevent its reuse.

    >>> import torch
    >>> x, y = torch.zeros(2), torch.ones(2)
    >>> again = Outputs({"same": x, "part": x[1:], "new": y}, {"x": x}, {}, lambda tensor: tensor)
    >>> found = again({"x": (other := torch.tensor([2.0, 3.0]))})
    >>> found["same"] is other, found["part"], found["new"], found["new"] is y
    (True, tensor([3.]), tensor([1., 1.]), False)
    """

    def __init__(
        self,
        outputs: Mapping[str, Any],
        lent: Mapping[str, Any],
        lasting: Mapping[str, Any],
        borrowed: Callable[[Any], Any],
    ):
        self._lent = {_storage(leaf): (key, leaf) for key, leaf in _tensors(lent)}
        self._lasting = {_storage(leaf) for _, leaf in _tensors(lasting)}
        self._spans: dict[int, _Span] = {}  # by address of a storage
        self._viewed: dict[str, set[int]] = {}  # of inputs, the leaves that outputs are views of
        self._trees = {label: transform(self._found, tree) for label, tree in outputs.items()}
        self._rows = {at: (borrowed(_row(span)), span.first) for at, span in self._spans.items()}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a replay on these inputs.

        The caller's streams must wait for the replay first.
        """
        given: dict[Hashable, Any] = {
            (name, number): leaf
            for name, numbers in self._viewed.items()
            for number, leaf in enumerate(flatten(inputs[name]))
            if number in numbers
        }
        copies = {address: (row.clone(), first) for address, (row, first) in self._rows.items()}

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, _View):
                return leaf
            if leaf.of in copies:
                copy, first = copies[leaf.of]
                whole = copy.numel() // leaf.like.element_size() * leaf.like.element_size()
                return leaf.on(copy[:whole].view(leaf.like.dtype), -first)
            given_now = given[leaf.of]
            if leaf.is_whole:
                return given_now
            return leaf.on(given_now, given_now.storage_offset() * given_now.element_size())

        return {label: transform(made, tree) for label, tree in self._trees.items()}

    def _found(self, leaf: Any) -> Any:
        """Return a tensor as a view; unchanged if its memory keeps its address or is unknown."""
        if not is_strided(leaf) or not leaf.numel() or (address := _storage(leaf)) in self._lasting:
            return leaf
        if address in self._lent:
            key, base = self._lent[address]
            name, number = key
            self._viewed.setdefault(name, set()).add(number)
            return _View.of_tensor(key, leaf, leaf.data_ptr() - base.data_ptr(), leaf is base)
        found = _Span.of(leaf, address)
        self._spans[address] = found.joined(self._spans.get(address, found))
        return _View.of_tensor(address, leaf, leaf.data_ptr() - address)


class _Span(NamedTuple):
    """The bytes of a storage that are returned; ``tensor`` has the smallest elements."""

    tensor: Any
    first: int
    end: int

    @classmethod
    def of(cls, tensor: Any, storage: int) -> _Span:
        first = tensor.data_ptr() - storage
        end = first + span(tensor) * tensor.element_size()
        return cls(tensor, first // _ALIGNED * _ALIGNED, end)

    def joined(self, other: _Span) -> _Span:
        tensor = min(self.tensor, other.tensor, key=lambda tensor: tensor.element_size())
        return _Span(tensor, min(self.first, other.first), max(self.end, other.end))


@dataclass(frozen=True)
class _View:
    """A tensor that begins ``first`` bytes into memory that is different in each run."""

    of: Hashable
    first: int
    is_whole: bool
    like: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of_tensor(cls, of: Hashable, tensor: Any, first: int, is_whole: bool = False) -> _View:
        like = tensor.detach().new_empty(0)
        return cls(of, first, is_whole, like, tuple(tensor.shape), tuple(tensor.stride()))

    def on(self, tensor: Any, start: int) -> Any:
        """Return the view on a tensor's storage, whose memory begins at the byte ``start``."""
        offset = (self.first + start) // self.like.element_size()
        if tensor.dtype == self.like.dtype:
            return tensor.detach().as_strided(self.shape, self.stride, offset)
        return self.like.new_empty(0).set_(
            tensor.untyped_storage(), offset, self.shape, self.stride
        )


def is_strided(leaf: Any) -> bool:
    """Whether this is a tensor that is described by its memory and strides."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not (leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)
    )


def _tensors(trees: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield the tensors of trees, with the name of the tree and the number of the leaf."""
    for name, tree in trees.items():
        for number, leaf in enumerate(flatten(tree)):
            if is_strided(leaf) and leaf.numel():
                yield (name, number), leaf


def _storage(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _row(bytes_of: _Span) -> Any:
    """Return the bytes of a span as a tensor."""
    tensor, first, end = bytes_of
    size = tensor.element_size()
    items = tensor.detach().as_strided(((end - first) // size,), (1,), first // size)
    return items.view(sys.modules["torch"].uint8)
