"""Tensors are recognized by compiled code if, and only if, all that Python reads of them is equal."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import torch._dynamo  # or torch's guards are not used
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from autosched._lib.tensor_guards import have_hooks, recognizer

Tensors = dict[str, Any]


class Sub(Tensor):
    """A subclass, which has the fields of a tensor and more."""


class Pretender:
    """Is an instance of Tensor, says ``isinstance``, and has none of its fields."""

    __slots__ = ()
    __class__ = Tensor  # type: ignore[assignment]


LIVING = torch.zeros(2, 2)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 2)


def without_memory() -> Tensor:
    made = torch.zeros(2, 2)
    made.untyped_storage().resize_(0)
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.zeros(2, 2),
    "transposed": lambda: torch.zeros(2, 2).t(),
    "complex": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "conjugated": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj().imag,
    "integers": lambda: torch.zeros(2, 2, dtype=torch.int32),
    "parameter": lambda: nn.Parameter(torch.zeros(2, 2)),
    "frozen parameter": lambda: nn.Parameter(torch.zeros(2, 2), requires_grad=False),
    "requires grad": lambda: torch.zeros(2, 2, requires_grad=True),
    "computed": lambda: torch.zeros(2, 2, requires_grad=True) + 1,
    "view": lambda: torch.zeros(8, 2)[3:5],
    "expanded": lambda: torch.zeros(1, 2).expand(2, 2),
    "number": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 2),
    "subclass": lambda: torch.zeros(2, 2).as_subclass(Sub),  # type: ignore[arg-type]
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "inference": inference,
    "without memory": without_memory,
    "lazy clone": lambda: torch.zeros(2, 2)._lazy_clone(),  # type: ignore[operator]
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
    "fake": lambda: FakeTensorMode().from_tensor(torch.zeros(2, 2)),
    "no tensor": lambda: 1.0,
    "pretender": Pretender,
    "proxy": lambda: weakref.proxy(LIVING),
}
ORDINARY = list(KINDS)[: list(KINDS).index("meta")]


def switch_class(item: Any) -> None:
    item.__class__ = Sub if type(item) is Tensor else Tensor


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda item: None,
    "elements": lambda item: item.detach().add_(1),
    "t_": lambda item: item.t_(),
    "unsqueeze_": lambda item: item.unsqueeze_(0),
    "resize_": lambda item: item.resize_(3, 2),
    "as_strided_": lambda item: item.as_strided_((2, 2), (0, 1)),
    "requires_grad_": lambda item: item.requires_grad_(not item.requires_grad),
    "set_": lambda item: item.set_(torch.zeros(2, 2)),
    "data": lambda item: setattr(item, "data", item.data.clone()),
    "data of another dtype": lambda item: setattr(item, "data", item.data.half()),
    "data here, transposed": lambda item: setattr(item, "data", item.data.t()),
    "data begins later": lambda item: setattr(item, "data", torch.zeros(4, 2)[2:]),
    "swapped": lambda item: torch.utils.swap_tensors(item, torch.zeros(2, 2)),
    "class": switch_class,
    "no memory": lambda item: item.untyped_storage().resize_(0),
    "gradient": lambda item: setattr(item, "grad", torch.zeros(item.shape)),
    "hook": lambda item: item.register_hook(lambda grad: grad),
    "hook afterwards": lambda item: item.register_post_accumulate_grad_hook(lambda item: None),
}


def facts(item: Any, is_fixed: bool) -> Hashable:
    """Return what must be equal, as Python reads it."""
    return (
        (type(item), item.dtype, item.device, tuple(item.shape), item.stride())
        + (item.requires_grad, torch._C._dispatch_keys(item).raw_repr())
        + ((item.data_ptr(),) if is_fixed else ())
    )


class Reference:
    """What ``recognizer`` returns, in Python, slowly."""

    def __init__(self, tensors: Tensors, fixed: set[str], without_grad: set[str], bare: bool):
        self.names = list(tensors)
        self.fixed, self.without_grad, self.bare = fixed, without_grad, bare
        self.facts = [facts(item, name in fixed) for name, item in tensors.items()]

    def __call__(self, found: Tensors) -> bool:
        if list(found) != self.names:
            return False
        try:
            if [facts(item, name in self.fixed) for name, item in found.items()] != self.facts:
                return False
        except (AttributeError, RuntimeError, ArithmeticError, TypeError, ValueError):
            return False
        return not any(found[name].grad is not None for name in self.without_grad) and not (
            self.bare and have_hooks(found.values())
        )


some_names = st.sets(st.sampled_from("abc"))


@given(
    kinds=st.lists(st.sampled_from(ORDINARY), min_size=3, max_size=3),
    options=st.tuples(some_names, some_names, st.booleans()),
    changes=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([*CHANGES, *KINDS, "twice"])), max_size=3
    ),
    order=st.one_of(st.none(), st.permutations(["a", "b", "c"]), st.just(["a", "b"])),
)
def test_compiled_code_compares_what_python_would(
    kinds: list[str],
    options: tuple[set[str], set[str], bool],
    changes: list[tuple[str, str]],
    order: list[str] | None,
) -> None:
    tensors = {name: KINDS[kind]() for name, kind in zip("abc", kinds, strict=True)}
    is_alike = recognizer(tensors, *options)
    wanted = Reference(tensors, *options)
    assert is_alike is not None
    for name, change in changes:
        if change in KINDS:
            tensors[name] = KINDS[change]()
        elif change == "twice":
            tensors[name] = tensors["a"]
        else:
            try:
                with torch.no_grad():
                    CHANGES[change](tensors[name])
            except (RuntimeError, AttributeError, TypeError, ValueError):
                pass
        assert is_alike(tensors) == is_alike(dict(tensors))
        assert is_alike(tensors) == wanted(tensors), (name, change)
    if order is not None:
        found = {name: tensors[name] for name in order}
        assert is_alike(found) == (is_alike(tensors) and order == ["a", "b", "c"])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_are_compared_or_refused(kind: str) -> None:
    tensors = {"a": torch.zeros(2, 2), "b": KINDS[kind]()}
    for fixed in ((), ("b",)):
        is_alike = recognizer(tensors, fixed, ("a",), True)
        assert is_alike is not None or kind not in ORDINARY
        assert is_alike is None or is_alike(tensors)
        others = [other for other in KINDS if other != kind and is_alike is not None]
        for other in others:
            found = {"a": tensors["a"], "b": KINDS[other]()}
            assert is_alike is not None
            assert not is_alike(found) or facts(found["b"], False) == facts(tensors["b"], False)
    assert torch._C._is_torch_function_enabled()  # a guard that raises would leave it off


def test_memory_that_is_shared_until_it_is_written_is_at_another_address() -> None:
    source = torch.zeros(2, 2)
    is_alike = recognizer({"x": source}, ("x",), (), False)
    assert is_alike is not None
    assert not is_alike({"x": source._lazy_clone()})  # type: ignore[operator]
    assert is_alike({"x": source})


def test_nothing_but_classes_is_kept_alive() -> None:
    class Local(Tensor):
        pass

    x = torch.zeros(2).as_subclass(Local)  # type: ignore[arg-type]
    kind = weakref.ref(Local)
    is_alike = recognizer({"x": x}, ("x",), (), True)
    last = weakref.ref(x)
    del x, Local
    gc.collect()
    assert last() is None
    assert kind() is not None  # or another class might come to its address
    del is_alike
    gc.collect()
    assert kind() is None


def test_forked_processes_compare() -> None:
    x = torch.zeros(2)
    is_alike = recognizer({"x": x}, ("x",), (), True)
    assert is_alike is not None
    child = os.fork()
    if child == 0:
        os._exit(not (is_alike({"x": x}) and not is_alike({"x": x.clone()})))
    assert os.waitpid(child, 0)[1] == 0
