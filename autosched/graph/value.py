"""Define values: variables whose operators and methods add tasks.

A torch function, operator or method that is applied to a ``Value`` adds a task to the graph. This
module knows the Python and torch syntax of calls, and passes each call to the graph. It does not
import torch, because the ``__torch_function__`` protocol needs no import.
"""

from __future__ import annotations

import difflib
import dis
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from autosched._lib.tree import flatten
from autosched.errors import GraphError, UnknownMethodError
from autosched.graph.effects import result_names

if TYPE_CHECKING:
    from autosched.graph.recorder import Recorder
    from autosched.graph.regions import Region

_ATTRIBUTES = frozenset("T mT H mH real imag".split())  # read, not called
_AUTOGRAD = frozenset("backward requires_grad_ retain_grad register_hook".split())
_UNKNOWN = frozenset(
    "shape dtype device grad grad_fn data ndim requires_grad is_cuda is_leaf layout names itemsize "
    "nbytes".split()
)

_Operator = Callable[[Any, Any], "Value"]


def _recorded(
    of: Value, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None, **options: Any
) -> Value:
    """Add a task with one result to the graph of a value."""
    result: Value = of.graph.record(fn, args, kwargs or {}, **options)
    return result


def _binary(fn: Callable[..., Any]) -> _Operator:
    def method(self: Any, other: Any) -> Value:
        return _recorded(self, fn, (self, other))

    return method


class InPlace:
    """Apply an in-place operator, and check that it was in place.

    ``n += 1`` makes a new object of a Python number.
    """

    def __init__(self, fn: Callable[[Any, Any], Any]):
        self.__name__ = f"__{fn.__name__}__"
        self.fn = fn

    def __call__(self, value: Any, other: Any) -> Any:
        """Change the value."""
        if self.fn(value, other) is not value:
            raise TypeError(
                f"{value!r} is a {type(value).__name__}, which {self.__name__} cannot change in "
                "place"
            )
        return value


def _operators(
    fn: Callable[..., Any], in_place: Callable[..., Any]
) -> tuple[_Operator, _Operator, _Operator]:
    """Return the methods of an operator, with a value on its left, on its right, and in place."""

    def reflected(self: Any, other: Any) -> Value:
        return _recorded(self, fn, (other, self))

    return _binary(fn), reflected, _binary(InPlace(in_place))


def _unary(fn: Callable[..., Any]) -> Callable[[Any], Value]:
    def method(self: Any) -> Value:
        return _recorded(self, fn, (self,))

    return method


@dataclass(eq=False, slots=True)
class Value:
    """A variable that tasks read and write: an input, a constant, or a result of a task.

    Use it like a tensor: each operator, method or torch function that is applied to it adds a task,
    and nothing runs. It has no shape yet, and Python control flow cannot depend on it. ``name`` is
    unique in its ``graph``, and ``nbytes`` is its size in bytes, if given.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x, w = graph.inputs("x", "w")
    >>> (x @ w).relu()
    Value('relu')
    """

    graph: Recorder
    index: int
    name: str
    producer: int | None  # index of the task that makes it; None for inputs and constants
    root: int  # index of the value whose memory it shares, or its own
    region: Region  # of that memory
    home: str | None  # the device of an input; None if schedule() may choose it
    tensor: Any  # of a constant
    nbytes: int | None  # its size, if the user gave it
    copy_of: str | None = None  # of an input that runs fill with the contents of another, its name

    def __repr__(self) -> str:
        return f"Value({self.name!r})"

    __hash__ = object.__hash__
    __array_ufunc__ = None  # so that operators of NumPy numbers defer to this class

    @classmethod
    def __torch_function__(
        cls, fn: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = next(leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Value))
        return value.graph.record(fn, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in _UNKNOWN or _is_property(name):
            raise self._unknown(
                f"has no {name} before it runs", "do what needs it inside a function"
            )
        if name in _AUTOGRAD:
            raise GraphError(
                f"autograd does not record across tasks, so value {self.name!r} has no {name}; "
                "compute gradients "
                f"inside a task, under torch.enable_grad(), or by tasks of their own"
            )
        if name.startswith("_"):
            raise AttributeError(f"Value has no attribute {name!r}")
        names = self._result_names()
        if name in names:
            at = names.index(name)
            part = self.graph.fresh(f"{self.name}.{name}")
            return _recorded(self, Attribute(name, at), (self, at), name=part)
        if name in _ATTRIBUTES:
            return self.graph.record(Attribute(name), (self,), {})
        _check_method(self.name, name)
        return functools.partial(self._called, Method(name))

    def _called(self, method: Method, /, *args: Any, **kwargs: Any) -> Any:
        return self.graph.record(method, (self, *args), kwargs)

    def to(self, /, *args: Any, **kwargs: Any) -> Value:
        """Return this value on a device, or in another dtype, as in torch.

        ``y.to("cpu")`` adds a task on that device.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], str):
            return _recorded(self, On(args[0]), (self,), on=args[0], aliases=self)
        return _recorded(self, Method("to"), (self, *args), kwargs)

    def cpu(self) -> Value:
        """Return this value on the CPU, as ``to("cpu")`` does."""
        return self.to("cpu")

    def cuda(self, index: int = 0) -> Value:
        """Return this value on a GPU, as ``to("cuda:0")`` does."""
        return self.to(f"cuda:{index}")

    def __getitem__(self, key: Any) -> Value:
        return _recorded(self, operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.graph.record(operator.setitem, (self, key, value), {})

    def __bool__(self) -> NoReturn:
        raise self._unknown(
            "is not known before it runs, so Python cannot branch on it",
            "put the branch into a function",
        )

    def __iter__(self) -> Iterator[Any]:
        names = self._result_names()
        count = _unpacked(sys._getframe(1)) or len(names)
        if not count:
            raise GraphError(
                f"value {self.name!r} has no length before it runs; say how many results its task "
                "has: graph.add(fn, ..., outputs=2), or unpack it: a, b = value"
            )
        labels = names if len(names) == count else range(count)
        parts = tuple([self.graph.fresh(f"{self.name}.{label}") for label in labels])
        return iter(self.graph.add(tuple, self, outputs=parts))

    def _result_names(self) -> tuple[str, ...]:
        """Return the names that torch gives to the results of the task that makes this value."""
        task = None if self.producer is None else self.graph.tasks[self.producer]
        if task is None or task.result is not self:
            return ()
        return result_names(task.fn, task.args, task.kwargs)

    def _unknown(self, what: str, otherwise: str) -> GraphError:
        """Return the error of code that needs to know this value before it runs."""
        module = _calling_module()
        advice = f"{otherwise} and add that as one task: graph.add(fn, {self.name})"
        if module is not None:
            advice = (
                f"{module}.forward needs it. Add the module as one task, graph.add(module, ...), "
                "with outputs= if it returns several tensors, or capture a function that calls it "
                "with asc.capture"
            )
        return GraphError(f"value {self.name!r} {what}; {advice}")

    def _no_number(self) -> NoReturn:
        raise GraphError(
            f"value {self.name!r} is not a number before it runs; read it from the schedule's "
            "outputs"
        )

    __float__ = __int__ = __index__ = __complex__ = _no_number

    def __len__(self) -> int:
        return len(self._result_names()) or self._no_number()

    __add__, __radd__, __iadd__ = _operators(operator.add, operator.iadd)
    __sub__, __rsub__, __isub__ = _operators(operator.sub, operator.isub)
    __mul__, __rmul__, __imul__ = _operators(operator.mul, operator.imul)
    __matmul__, __rmatmul__, __imatmul__ = _operators(operator.matmul, operator.imatmul)
    __truediv__, __rtruediv__, __itruediv__ = _operators(operator.truediv, operator.itruediv)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _operators(operator.floordiv, operator.ifloordiv)
    __mod__, __rmod__, __imod__ = _operators(operator.mod, operator.imod)
    __pow__, __rpow__, __ipow__ = _operators(operator.pow, operator.ipow)
    __and__, __rand__, __iand__ = _operators(operator.and_, operator.iand)
    __or__, __ror__, __ior__ = _operators(operator.or_, operator.ior)
    __xor__, __rxor__, __ixor__ = _operators(operator.xor, operator.ixor)
    __lshift__, __rlshift__, __ilshift__ = _operators(operator.lshift, operator.ilshift)
    __rshift__, __rrshift__, __irshift__ = _operators(operator.rshift, operator.irshift)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)  # type: ignore[assignment]
    __ne__ = _binary(operator.ne)  # type: ignore[assignment]
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)


class Method:
    """Call the method ``name`` of the first argument."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return getattr(value, self.__name__)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tensor.{self.__name__}"


class Attribute(Method):
    """Read the attribute ``name`` of the argument.

    With a ``position``, it is a named result of the call that made the argument: a view, as the
    item at this position is.
    """

    def __init__(self, name: str, position: int | None = None):
        super().__init__(name if position is None else "getitem")
        self.attribute = name

    def __call__(self, value: Any, position: int | None = None) -> Any:
        """Read the attribute."""
        return getattr(value, self.attribute)


class On:
    """Return the argument; the schedule copies it to the device."""

    def __init__(self, device: str):
        self.__name__ = f"to_{device}"

    def __call__(self, value: Any) -> Any:
        """Return the argument."""
        return value


def _tensor_class() -> Any:
    """Return ``torch.Tensor``; None if torch is not imported, so that no value is a tensor."""
    return getattr(sys.modules.get("torch"), "Tensor", None)


def _is_property(name: str) -> bool:
    """Whether tensors have a non-method attribute of this name that cannot become a task."""
    known = getattr(_tensor_class(), name, None)
    return known is not None and name not in _ATTRIBUTES and not callable(known)


def _check_method(value: str, name: str) -> None:
    """Raise GraphError for a method that tensors do not have, with suggestions."""
    tensor = _tensor_class()
    if tensor is None or hasattr(tensor, name):
        return
    close = difflib.get_close_matches(
        name, [known for known in dir(tensor) if not known.startswith("_")]
    )
    meant = f"did you mean {' or '.join(map(repr, close))}? For what" if close else "for what"
    raise UnknownMethodError(
        f"value {value!r} has no method {name!r}, for tensors have none of that name; {meant} is "
        f"no tensor, add a function: graph.add(lambda item: item.{name}(...), {value})"
    )


def _unpacked(frame: FrameType) -> int:
    """Return into how many names the statement of a frame unpacks; 0 if it does something else.

    As in torch.fx, the statement says how many results there are, where nothing else does.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return code[at + 1] if dis.opname[code[at]] == "UNPACK_SEQUENCE" else 0


def _calling_module() -> str | None:
    """Return the class of the module that is called, if any: the innermost."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        kind = type(frame.f_locals.get("self"))
        if hasattr(kind, "named_parameters"):
            return kind.__name__
        frame = frame.f_back
    return None
