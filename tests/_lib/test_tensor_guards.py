"""Tensors are recognized by compiled code if, and only if, all that Python reads of them is equal."""

from __future__ import annotations

import gc
import os
import shlex
import subprocess
import sysconfig
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # or torch's guards are not used
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functionalize, vmap
from torch.overrides import TorchFunctionMode

from autosched._lib import extension, native_check, tensor_guards

Tensors = dict[str, Any]


class Sub(Tensor):
    """A subclass, which has the fields of a tensor and more."""


class Wrapper(Tensor):
    """Has a size that its Python code returns."""

    @staticmethod
    def __new__(cls, policy: str = "sizes") -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, (2, 2), dispatch_sizes_strides_policy=policy
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise ArithmeticError(func)


class Pretender:
    """Is an instance of Tensor, says ``isinstance``, and has none of its fields."""

    __slots__ = ()
    __class__ = Tensor  # type: ignore[assignment]


LIVING = torch.zeros(2, 2)


def inside(transform: Callable[..., Any]) -> Tensor:
    """Return the tensor that a function gets from one of torch's transforms."""
    found = []
    transform(lambda item: found.append(item) or item.clone())(torch.zeros(2, 2))
    return found[0]


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
    "six dimensions": lambda: torch.zeros(1, 1, 1, 1, 2, 2),
    "number": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 2),
    "subclass": lambda: torch.zeros(2, 2).as_subclass(Sub),  # type: ignore[arg-type]
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "inference": inference,
    "without memory": without_memory,
    "lazy clone": lambda: torch.zeros(2, 2)._lazy_clone(),  # type: ignore[operator]
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "sparse rows": lambda: torch.zeros(2, 2).to_sparse_csr(),
    "mkldnn": lambda: torch.zeros(2, 2).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2, 2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.zeros(2), torch.zeros(1)], layout=torch.jagged
    ),
    "fake": lambda: FakeTensorMode().from_tensor(torch.zeros(2, 2)),
    "functional": lambda: inside(functionalize),
    "batched": lambda: inside(vmap),
    "zeros": lambda: torch._efficientzerotensor((2, 2)),
    "wrapper": Wrapper,
    "wrapper of strides": lambda: Wrapper("strides"),
    "nine dimensions": lambda: torch.zeros([1] * 9),
    "no tensor": lambda: 1.0,
    "class": lambda: Tensor,
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
    "swapped with an integer": lambda item: torch.utils.swap_tensors(
        item, torch.zeros(2, 2, dtype=torch.int64)
    ),
    "class": switch_class,
    "no memory": lambda item: item.untyped_storage().resize_(0),
    "other memory": lambda item: item.untyped_storage().resize_(1 << 16),
    "share_memory_": lambda item: item.share_memory_(),
    "gradient": lambda item: setattr(item, "grad", torch.zeros(item.shape)),
    "hook": lambda item: item.register_hook(lambda grad: grad),
    "hook that goes": lambda item: item.register_hook(lambda grad: grad).remove(),
    "hook afterwards": lambda item: item.register_post_accumulate_grad_hook(lambda item: None),
    "retained gradient": lambda item: item.retain_grad(),
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
            self.bare and tensor_guards.have_hooks(found.values())
        )


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if native_check._module() is None:
        pytest.skip("there is no compiler")


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
    is_alike = native_check.native_recognizer(tensors, *options)
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
        # Compiled code does not copy memory that is shared until it is written; Python does.
        assert "lazy clone" in change or is_alike(tensors) == wanted(tensors), (name, change)
    if order is not None:
        found = {name: tensors[name] for name in order}
        assert is_alike(found) == (is_alike(tensors) and order == ["a", "b", "c"])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_are_compared_or_refused(kind: str) -> None:
    tensors = {"a": torch.zeros(2, 2), "b": KINDS[kind]()}
    for fixed in ((), ("b",)):
        is_alike = native_check.native_recognizer(tensors, fixed, ("a",), True)
        assert is_alike is not None or kind not in ORDINARY
        assert is_alike is None or is_alike(tensors)
        others = [other for other in KINDS if other != kind and is_alike is not None]
        for other in others:
            found = {"a": tensors["a"], "b": KINDS[other]()}
            assert is_alike is not None
            assert not is_alike(found) or facts(found["b"], False) == facts(tensors["b"], False)


@pytest.mark.parametrize("kind", ["no tensor", "class", "pretender", "proxy"])
def test_what_is_no_tensor_is_not_read(kind: str) -> None:
    """Reading it may crash the process."""
    module = SimpleNamespace(fields=_refusing(AssertionError("read")))
    assert not native_check._is_readable(module, KINDS[kind](), False)


def test_memory_that_is_copied_when_it_is_written_is_at_no_fixed_address() -> None:
    source = torch.zeros(2, 2)
    is_alike = native_check.native_recognizer({"x": source}, ("x",), (), False)
    assert is_alike is not None
    assert is_alike({"x": source})
    clone = source._lazy_clone()  # type: ignore[operator]
    assert not is_alike({"x": clone})  # it is at the same address until Python asks for it
    assert not is_alike({"x": source})


@pytest.mark.parametrize("found", [[], (), None, 1, {}, {"x": None}, {1: 2}, "x", {"x": object()}])
def test_what_is_no_dict_of_these_tensors_is_not_recognized(found: Any) -> None:
    is_alike = native_check.native_recognizer({"x": torch.zeros(2)}, (), (), True)
    assert is_alike is not None
    assert not is_alike(found)


def test_names_are_compared_by_their_characters() -> None:
    x = torch.zeros(2)
    is_alike = native_check.native_recognizer({"name": x}, (), (), True)
    assert is_alike is not None
    assert is_alike({"".join(["na", "me"]): x})
    assert not is_alike({"nam": x})


def test_names_that_are_no_strings_are_refused() -> None:
    tensors: Any = {1: torch.zeros(2)}
    assert native_check.native_recognizer(tensors, (), (), True) is None


def test_nothing_but_classes_is_kept_alive() -> None:
    class Local(Tensor):
        pass

    x = torch.zeros(2).as_subclass(Local)  # type: ignore[arg-type]
    kind = weakref.ref(Local)
    is_alike = native_check.native_recognizer({"x": x}, ("x",), (), True)
    last = weakref.ref(x)
    del x, Local
    gc.collect()
    assert last() is None
    assert kind() is not None  # or another class might come to its address
    del is_alike
    gc.collect()
    assert kind() is None


def test_a_class_that_refers_to_its_check_is_freed() -> None:
    class Local(Tensor):
        is_alike: Any

    x = torch.zeros(2).as_subclass(Local)  # type: ignore[arg-type]
    Local.is_alike = native_check.native_recognizer({"x": x}, (), (), True)
    kind = weakref.ref(Local)
    del x, Local
    gc.collect()
    assert kind() is None


# ---- building


@pytest.fixture
def compiled() -> str:
    """The file that was compiled before the test; requested before ``fresh``."""
    file: str = native_check._module().__file__
    return file


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Let nothing be compiled yet, and the folder for it be empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    native_check._module.cache_clear()
    yield tmp_path / "a cache" / "autosched"
    native_check._module.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that is called as the compiler, in a folder whose name has a space."""
    script = tmp_path / "a folder" / "compile"
    script.parent.mkdir()
    script.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"{shlex.quote(str(script))} -DOPTION='of two words'")
    return script


def _refusing(error: Exception) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


FAILURES: dict[str, Exception] = {
    "error: no such header": subprocess.CalledProcessError(
        1, "g++", b"", b"x\nerror: no such header"
    ),
    "TimeoutExpired": subprocess.TimeoutExpired("g++", 60),
    "PermissionError": PermissionError("no"),
}


@pytest.mark.parametrize("why", FAILURES)
def test_where_it_cannot_be_compiled_torch_compares(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    monkeypatch.setattr(extension, "_run", _refusing(FAILURES[why]))
    x = torch.zeros(2)
    with caplog.at_level("INFO", "autosched"):
        for _ in range(2):
            is_alike = tensor_guards.recognizer({"x": x}, fixed={"x"})
            assert is_alike is not None
            assert is_alike({"x": x})
            assert not is_alike({"x": x.clone()})
    (message,) = caplog.messages  # once
    assert why in message
    assert not list(fresh.iterdir())


def test_where_there_is_no_compiler_torch_compares(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level("INFO", "autosched"):
        assert tensor_guards.recognizer({"x": torch.zeros(2)}) is not None
    assert "no-such-compiler" in caplog.text


def test_a_torch_with_other_fields_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = native_check._module()
    monkeypatch.setattr(native_check, "_fits", lambda *_: False)
    native_check._module.cache_clear()
    with caplog.at_level("INFO", "autosched"):
        assert native_check._module() is None
    assert "other fields" in caplog.text
    native_check._module.cache_clear()
    assert module is not None


def test_what_is_compiled_is_loaded_by_later_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_run", _refusing(AssertionError("compiled again")))
    native_check._module.cache_clear()
    assert native_check._module() is not None


def test_the_compiler_may_have_options_and_paths_may_have_spaces(
    compiled: str, fresh: Path, compiler: Path
) -> None:
    """The script checks its option, and takes what was compiled before."""
    lines = '[ "$1" = "-DOPTION=of two words" ] || exit 1', f'cp "{compiled}" "${{@: -1}}"'
    compiler.write_text("\n".join(["#!/bin/bash", *lines]))
    module = native_check._module()
    assert module is not None
    assert list(fresh.iterdir()) == [Path(module.__file__)]


def test_a_compiler_that_hangs_is_killed_with_its_processes(
    fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted = compiler.with_name("child")
    compiler.write_text(f'#!/bin/bash\nsleep 60 &\necho $! > "{noted}"\nwait')
    monkeypatch.setattr(extension, "_SECONDS", 0.5)
    with caplog.at_level("INFO", "autosched"):
        assert native_check._module() is None
    assert "TimeoutExpired" in caplog.text
    assert not list(fresh.iterdir())
    child = int(noted.read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(process: int) -> bool:
    """Whether a process runs; one that ended, and that nobody waited for, does not."""
    command = "ps", "-o", "stat=", str(process)
    state = subprocess.run(command, check=False, capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("found", [b"", b"no library"])
def test_a_damaged_file_is_not_used(
    compiled: str, fresh: Path, caplog: pytest.LogCaptureFixture, found: bytes
) -> None:
    fresh.mkdir(parents=True)
    (fresh / Path(compiled).name).write_bytes(found)
    with caplog.at_level("INFO", "autosched"):
        assert native_check._module() is None
    assert "ImportError" in caplog.text


def test_where_nothing_can_be_written_nothing_is_compiled(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.parent.mkdir()
    fresh.write_text("a file in place of the folder")
    monkeypatch.setattr(extension, "_run", _refusing(AssertionError("compiled")))
    assert native_check._module() is None
    assert fresh.is_file()


def test_without_a_global_lock_dicts_may_change_during_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: name == "Py_GIL_DISABLED" or read(name)
    )
    native_check._module.cache_clear()
    assert native_check._module() is None
    native_check._module.cache_clear()


def test_every_field_is_tried_before_torch_is_read() -> None:
    module = native_check._module()

    class Other:
        fields = module.fields

        @staticmethod
        def recorded(*facts: Any) -> Any:
            is_alike = module.recorded(*facts)
            first = facts[2][0]

            def blind(found: Tensors) -> bool:  # to what differs
                item = found["x"]
                return getattr(item, field) != getattr(first, field) or bool(is_alike(found))

            return blind

    for field in ("dtype", "shape", "requires_grad", "device"):
        assert not native_check._fits(Other, torch), field


class Watching(TorchFunctionMode):
    """A mode that no call of torch may reach."""

    def __torch_function__(self, *call: Any) -> Any:
        raise AssertionError(call)


@pytest.mark.parametrize("transform", [functionalize, vmap, None])
def test_torch_is_read_for_the_first_time_anywhere(transform: Any) -> None:
    native_check._module.cache_clear()
    try:
        if transform is None:
            with torch.inference_mode(), FakeTensorMode(), Watching():
                assert native_check._module() is not None
        else:
            transform(lambda x: x if native_check._module() is not None else None)(torch.zeros(2))
            assert native_check._module() is not None
    finally:
        native_check._module.cache_clear()


def test_forked_processes_compare() -> None:
    x = torch.zeros(2)
    is_alike = native_check.native_recognizer({"x": x}, ("x",), (), True)
    assert is_alike is not None
    child = os.fork()
    if child == 0:
        os._exit(not (is_alike({"x": x}) and not is_alike({"x": x.clone()})))
    assert os.waitpid(child, 0)[1] == 0
