"""Run a fused region: several tasks, compiled to few kernels, by Inductor or another compiler.

A region is compiled for the sizes, strides, dtypes and devices of its arguments and for torch's
settings, at its first call with such arguments. If it cannot be compiled, its tasks are called one
by one, as in the graph without fusion.

Nobody would notice kernels that compute something else. So in some runs the tasks are called, too,
on copies of the arguments, and the results are compared:

1. in runs 1, 2, 3, 10, 100 and 1,000 for such arguments, and when a number that the region takes
   has a sign that it did not have in a compared run: state that is zero hides faults;
2. if they agree, those of the kernels count, as in any other run;
3. if they differ, the region is never fused again, a warning says so, and those of the tasks count.

Kernels and tasks write to copies, and the arguments are written once: counters and moments advance
as in one run, also if kernels fail.

Regions with the same operators and arguments, such as the layers of a transformer, share one
compiled function.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.aliasing import extents
from autosched._lib.logs import LOG
from autosched._lib.recent import MOST
from autosched._lib.tensor_guards import guard
from autosched._lib.tree import flatten, transform
from autosched.codegen.composite import Composite
from autosched.errors import ScheduleError
from autosched.fusion.inductor import LOCK, compile_graph, unavailable, unsuitable
from autosched.fusion.tracing import NotTraceableError, Traced, as_tensor, described, trace

Compiler = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
"""Makes a function of a graph of operators and example tensors, as backends of torch.compile do."""

COMPARED = frozenset((1, 2, 3, 10, 100, 1_000))  # runs, for each kind of arguments

_SHOWN = 5  # operators in a warning


class _Kernels:
    """A compiled function, shared by all regions that would be compiled to the same.

    Compilers may return an argument, a tensor twice, or a part of a larger one, where operators
    return new tensors; and other strides. The first call finds out which results these are, and
    every call copies them. ``mismatch`` says how results differ from those of the operators, once
    they do.
    """

    def __init__(
        self,
        call: Callable[..., Sequence[torch.Tensor]],
        traced: Traced,
        compiler: Compiler | None,
    ):
        self._call = call
        self.traced = traced
        self._copied: list[int] | None = None
        self.precision = _precision(traced.graph)
        self.mismatch: str | None = None
        self.compiler = compiler  # its id is not another one's while this exists

    def __call__(self, *args: torch.Tensor) -> list[Any]:
        args = _with_old(args, self.traced.old)
        with _no_autocast():  # the casts are among the operators
            returned = self._call(*args)
        made = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        if self._copied is None:
            self._copied = self._to_copy(made, args)
        for i in self._copied:
            made[i] = _copy(made[i], self.traced.results[i][0])
        for i, kind in self.traced.numbers.items():
            made[i] = kind(made[i].item())
        return made

    def _to_copy(self, made: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> list[int]:
        """Return the positions of results that are not tensors of their own, as expected."""
        taken = {_storage(arg) for arg in args}
        found = []
        if len(made) != len(self.traced.results):
            raise ValueError(f"{len(made)} results in place of {len(self.traced.results)}")
        for i, (item, (strides, nbytes)) in enumerate(zip(made, self.traced.results, strict=True)):
            larger = item.untyped_storage().nbytes() > nbytes
            if larger or item.stride() != strides or _storage(item) in taken:
                found.append(i)
            taken.add(_storage(item))
        return found


def compiler_of(fuse: bool | Compiler) -> Compiler | None:
    """Return the compiler that an option ``fuse=`` names; None: Inductor.

    Raises ScheduleError for what is neither a bool nor a function.
    """
    if not isinstance(fuse, bool) and not callable(fuse):
        raise ScheduleError(
            f"fuse must be True, False or a function (graph module, examples) -> function, got "
            f"{fuse!r}"
        )
    return None if isinstance(fuse, bool) else fuse


def _no_autocast() -> contextlib.AbstractContextManager[Any]:
    if torch._C._is_any_autocast_enabled():
        return torch._C._DisableAutocast()
    return contextlib.nullcontext()


def _precision(graph: torch.fx.GraphModule) -> float:
    """Return the largest unit in the last place of what a graph computes with."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    units = [torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex]
    return max(units, default=torch.finfo(torch.float32).eps)


def _copy(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy with these strides; elements with a stride of 0 are written once."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(tensor[once])
    return made


def _with_old(args: Sequence[Any], old: Sequence[int]) -> tuple[Any, ...]:
    """Return arguments, and copies of those at some positions."""
    if not old:
        return tuple(args)
    return (*args, *[_copy(args[i].detach(), args[i].stride()) for i in old])


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ranges of memory overlap from the first to the last element of tensors."""
    spans = sorted((extent.first, extent.end) for extent in extents(tensors))
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_shared: weakref.WeakValueDictionary[Hashable, _Kernels] = weakref.WeakValueDictionary()
_faulty: list[_Kernels] = []  # kept, so that no region is compiled to them again


# Whether this thread runs the operators of a region, also those of regions inside.
_operators_only = ContextVar("operators_only", default=False)


class _Variant:
    """What a region calls for some arguments: ``kernels``, or its tasks one by one (None).

    ``devices`` are what it is given for these; ``floats`` are the positions of floats. Guards are
    of the tensors, and of torch's dtype by default, autocast, grad mode and determinism.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        devices: Sequence[Any],
        floats: Sequence[int],
        kernels: _Kernels | None,
    ):
        self.are_alike = guard(tensors)
        self.is_set = GlobalStateGuard().check
        self.devices = devices
        self.floats = floats
        self.kernels = kernels
        self.forget_runs()

    def forget_runs(self) -> None:
        """Begin to count."""
        self._runs = 0
        self._signs: set[tuple[int, ...]] = set()  # of numbers, in compared runs

    def is_due(self, given: Sequence[Any]) -> bool:
        """Count a run; return whether it is one of those that are compared."""
        self._runs += 1
        signs = tuple([(given[i] > 0) - (given[i] < 0) for i in self.floats])
        if self._runs not in COMPARED and signs in self._signs:
            return False
        self._signs.add(signs)
        return True


class Region:
    """A call of the tasks of ``composite``, fused for ``threads`` threads of a CPU stream.

    ``failure`` is the reason why it is not fused, once that is known. With ``compares`` False, runs
    are neither counted nor compared: they are for timing, on copies of inputs. ``when_tried`` is
    called once, when it has been compiled, or that has failed.
    """

    def __init__(self, composite: Composite, threads: int, compiler: Compiler | None = None):
        self.composite = composite
        self.threads = threads
        self.compiler = compiler  # default: Inductor
        self.compares = True
        self.when_tried: Callable[[], object] | None = None
        self.failure: str | None = None
        self.mismatch: str | None = None  # how kernels differed from the operators
        self.is_given_up = False
        self._count = len(composite.takes)
        self._single = len(composite.gives) == 1
        uses = {use.value for task in composite.tasks for use in task.writes}
        self._written = [i for i, value in enumerate(composite.takes) if value in uses]
        self._variants: list[_Variant] = []  # most recently made first

    def __call__(self, *args: Any) -> Any:
        """Run the region on the values that it takes, and the placeholders for its device."""
        variant = None if _operators_only.get() else self._variant(args)
        if variant is None or variant.kernels is None:
            return self.composite(*args)
        kernels = variant.kernels
        if kernels.mismatch is not None:
            self._give_up(kernels.mismatch, kernels.mismatch)
            return self.composite(*args)
        given = args[: self._count]
        if self._written and _share(given):
            return self.composite(*args)
        if self.compares and variant.is_due(given):
            if _is_recorded(given):  # by a CUDA graph, which would replay the comparison
                return self.composite(*args)
            return self._compared(kernels, args)
        return self._one_or_all(kernels(*(map(as_tensor, given) if variant.floats else given)))

    def begin_to_compare(self) -> None:
        """Count runs from now on, and compare results: what came before were trials."""
        self.compares = True
        for variant in self._variants:
            variant.forget_runs()

    def _give_up(self, why: str, mismatch: str | None = None) -> None:
        """Call the tasks one by one from now on."""
        self.failure = why
        self.mismatch = mismatch
        self.is_given_up = True
        self._variants = []

    def __repr__(self) -> str:
        return f"<Region of {len(self.composite.tasks)} tasks>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; compiled functions stay in this process."""
        return self.__dict__ | {"_variants": [], "when_tried": None}

    @property
    def kernels(self) -> object:
        """What equal regions share once they are compiled; None before."""
        return self._variants[0].kernels if self._variants else None

    # ---- compiling

    def _variant(self, args: Sequence[Any]) -> _Variant | None:
        """Return the variant for these arguments, a new one if need be; None if there is none."""
        given, devices = args[: self._count], args[self._count :]
        tensors, floats = given, []
        if float in map(type, given):
            tensors = tuple(map(as_tensor, given))
            floats = [i for i, arg in enumerate(given) if type(arg) is float]
        if (known := self._known(devices, floats, tensors)) is not None:
            return known
        if self.is_given_up or any(isinstance(arg, FakeTensor) for arg in given):
            return None  # in the second case, the region is only traced
        why = unsuitable(given)
        if why is None and len(self._variants) == MOST:
            why = f"it is called with more than {MOST} kinds of arguments"
        if why is not None:
            self.failure = why
            return None
        if self._written and _overlap(tensors):
            return None  # kernels would take it for granted in later calls, too
        with LOCK:
            if (known := self._known(devices, floats, tensors)) is not None:
                return known
            made = _Variant(tensors, devices, floats, self._kernels(given, devices))
            self._variants = [made, *self._variants]
        return made

    def _known(
        self, devices: Sequence[Any], floats: Sequence[int], tensors: Sequence[Any]
    ) -> _Variant | None:
        for variant in self._variants:
            alike = variant.devices == devices and variant.floats == floats
            if alike and variant.is_set() and variant.are_alike([*tensors]):
                return variant
        return None

    def _kernels(self, given: Sequence[Any], devices: Sequence[Any]) -> _Kernels | None:
        """Compile the region, or note why that is impossible."""
        try:
            for kind in sorted({arg.device.type for arg in map(as_tensor, given)}):
                if self.compiler is None and (why := unavailable(kind)):
                    raise NotTraceableError(why)
            traced = trace(lambda *values: self._all(*values, *devices), given, self._written)
            identity = (
                traced.graph.code,
                *map(_properties, given),
                *traced.numbers.items(),
                *map(tuple, (traced.old, traced.written)),
                self.threads,
                id(self.compiler),
                _settings(),
            )
            kernels = _shared.get(identity)
            if kernels is None:
                compiled = self._compiled(traced.graph, _with_old(given, traced.old))
                kernels = _shared[identity] = _Kernels(compiled, traced, self.compiler)
        except Exception as error:  # compilers raise many kinds of errors
            kernels = None
            name = "Inductor"
            if self.compiler is not None:
                name = getattr(self.compiler, "__qualname__", type(self.compiler).__qualname__)
            own = isinstance(error, NotTraceableError)
            self.failure = str(error) if own else f"{name}: {described(error)}"
            LOG.info("%r is not fused: %s", self, self.failure)
        if self.when_tried is not None:
            self.when_tried()
            self.when_tried = None
        return kernels

    def _compiled(self, graph: torch.fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        if self.compiler is None:
            return compile_graph(graph, given, self.threads)
        with torch.no_grad(), _no_autocast():
            made = self.compiler(graph, [as_tensor(arg).detach() for arg in given])
        if not callable(made):
            raise TypeError(f"it must return a function, and returned {made!r}")
        return made

    def _all(self, *args: Any) -> list[Any]:
        made = self.composite(*args)
        return [made] if self._single else list(made)

    def _one_or_all(self, made: Sequence[Any]) -> Any:
        return made[0] if self._single else tuple(made)

    # ---- comparing

    def _compared(self, kernels: _Kernels, args: Sequence[Any]) -> Any:
        """Run the kernels and the tasks on copies; return, and write, what counts."""
        given, others = args[: self._count], args[self._count :]
        written = kernels.traced.written
        copies = _copies(given, written)
        try:
            made = kernels(*map(as_tensor, copies))
        except Exception as error:
            own = self.composite(*args)  # which may raise an error, too
            self._give_up(f"its kernels fail: {described(error)}")
            return own

        def tasks(values: Sequence[Any]) -> Results:
            before = [values[i].clone() for i in written]
            inside = _operators_only.set(True)
            try:
                own = self._all(*values, *others)
            finally:
                _operators_only.reset(inside)
            return Results([*own, *(values[i] for i in written)], [*[None] * len(own), *before])

        def again() -> list[Results]:
            return references(tasks, given, kernels.precision)

        try:
            expected = tasks(_copies(given, written))
        except Exception:  # as the tasks do with the arguments themselves
            return self.composite(*args)
        found = [*made, *(copies[i] for i in written)]
        mismatch = find_mismatch(found, expected, again, kernels.precision, self._undefined())
        if mismatch is not None:
            kernels.mismatch = self._described(mismatch, written)
            _faulty.append(kernels)
            self._give_up(kernels.mismatch, kernels.mismatch)
            warnings.warn(f"{self.failure}. {_ADVICE}", RuntimeWarning, stacklevel=3)
            LOG.info("the region whose kernels differ:\n%s", kernels.traced.graph.code)
            return self.composite(*args)
        for i in written:
            given[i].copy_(copies[i])
        return self._one_or_all(made)

    def _undefined(self) -> list[int]:
        """Return the positions of results whose elements nothing has defined."""
        empty = {
            use.value
            for task in self.composite.tasks
            if "empty" in getattr(task.fn, "__name__", "")
            for use in task.outputs
        }
        written = {use.value for task in self.composite.tasks for use in task.writes}
        gives = self.composite.gives
        return [i for i, value in enumerate(gives) if value in empty - written]

    def _described(self, mismatch: Mismatch, written: Sequence[int]) -> str:
        """Return which result differs, and what made it."""
        values = [*self.composite.gives, *(self.composite.takes[i] for i in written)]
        value = values[mismatch.position]
        makers = [
            task
            for task in self.composite.tasks
            if any(use.value == value for use in (*task.outputs, *task.writes))
        ]
        tasks = [task for task in self.composite.tasks if not task.view]
        names = ", ".join(task.name for task in tasks[:_SHOWN])
        more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
        maker = makers[-1] if makers else tasks[-1]
        return (
            f"compiled kernels differ from the operators {names}{more}: the result of "
            f"{maker.name!r}, added at {maker.source}, by up to {mismatch.difference:.3g}, "
            f"where it is up to {mismatch.size:.3g}"
        )


_ADVICE = (
    "These tasks are not fused any more, and the results of the operators are used, in this run "
    "too. Please report it: this message, torch's version, and what the logger 'autosched' says at "
    "level INFO, which contains the operators"
)


def _copies(given: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """Return arguments, with copies of those that are written."""
    copies = list(given)
    for i in written:
        copies[i] = _copy(given[i].detach(), given[i].stride())
    return copies


def _share(given: Sequence[Any]) -> bool:
    """Whether two arguments begin at the same address."""
    found = [arg.data_ptr() for arg in given if isinstance(arg, torch.Tensor)]
    addresses = [address for address in found if address]
    return len({*addresses}) < len(addresses)


def _is_recorded(given: Sequence[Any]) -> bool:
    """Whether a CUDA graph records what is called."""
    on_gpu = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in given)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _properties(arg: Any) -> Hashable:
    if type(arg) is float:
        return "float"
    return tuple(arg.shape), arg.stride(), arg.dtype, arg.device


def _settings() -> Hashable:
    """Return the settings of torch on which the code of operators depends."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
    )


# ---- comparing results
#
# They round differently, and how much that matters depends on the operators: a gradient that should
# be zero is noise, and Adam makes steps of full size of it. So the judgement has two stages.
#
# 1. Results agree if they are close. What is written into an argument is judged by how it changes:
#    a step of a wrong size or sign is small beside the weights.
# 2. Others are compared with what rounding does to the operators themselves: they are computed in
#    double precision (as ``torch._dynamo.utils.same`` does), and from arguments changed by a few
#    units in the last place, or by 1e-11 where that is more. Kernels may deviate from the operators a
#    few times as far as these do.
#
# Integers, bools, and whether a number is finite, must be equal. Where they depend on rounding, as a
# comparison near a tie does, a few times as many may differ as in the two computations above, and one
# in 16 of the dtype's precision. Results of type float64 agree if they differ by 1e-10.

# By dtype, the difference from the operators' results that is small, relative to these.
_CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_ULPS = 4  # of the written value, by which any rounding may change it
# Times the deviation of the references. Kernels of half precision round less often than operators;
# those of single precision sum in other orders, and compute variances in one pass.
_NOISE, _NOISE_OF_HALVES = 10.0, 4.0
_PEAK = 10.0  # times the root mean square, for the largest difference of an element
_SQUARES = (100 * torch.finfo(torch.float32).eps) ** 2  # about the largest square of rounding
_TIES = 16  # units in the last place, within which the result of a comparison is open

# Arguments are changed by so many units of single or double precision, since sums round repeatedly:
# a sum of n numbers that cancel has some sqrt(n) times the error that changing them by a unit makes.
_UNITS = 8
_LEAST_UNIT = 1e-11  # by which arguments are changed: nothing is wider than double precision


class Mismatch(NamedTuple):
    """A result that differs: its position, the largest difference, and how large it should be."""

    position: int
    difference: float
    size: float


class Results(NamedTuple):
    """Results, tensors or numbers, and what was there before: None for those that are new."""

    made: Sequence[Any]
    before: Sequence[Any]


class _Errors(NamedTuple):
    """How tensors differ: root mean square, largest, and the number of exact differences."""

    mean: float
    largest: float
    exact: int


_OTHER_KIND = _Errors(math.inf, math.inf, 0)


def find_mismatch(
    found: Sequence[Any],
    expected: Results,
    references: Callable[[], Iterable[Results]],
    precision: float = torch.finfo(torch.float32).eps,
    undefined: Container[int] = (),
) -> Mismatch | None:
    """Return the first result that is not as expected, or None.

    ``references`` computes the same otherwise, and is called if results are not close.
    ``precision`` is the unit in the last place of what operators compute with. Results at the
    positions ``undefined`` may be anything.

    >>> one = Results([torch.ones(2)], [None])
    >>> find_mismatch([torch.ones(2) + 1e-6], one, list)
    >>> find_mismatch([torch.tensor([1.0, 3.0])], one, list)
    Mismatch(position=0, difference=2.0, size=1.0)
    """
    count = [i for i in range(len(expected.made)) if i not in undefined]
    doubtful = [i for i in count if not _agree(i, found[i], expected, [], precision)]
    known = list(references()) if doubtful else []
    for i in doubtful:
        one, other = found[i], expected.made[i]
        if not _agree(i, one, expected, known, precision):
            errors = _errors(one, other) if _kind(one) == _kind(other) else _OTHER_KIND
            return Mismatch(i, errors.largest or errors.exact, _errors(other, 0.0).largest)
    return None


def _agree(
    i: int, found: Any, expected: Results, references: Sequence[Results], precision: float
) -> bool:
    """Whether a result is as expected, given other ways to compute it."""
    made, before = expected.made[i], expected.before[i]
    if _kind(found) != _kind(made):
        return False
    if isinstance(made, Tensor) and made.is_meta:
        return True
    errors = _errors(found, made)
    noise = [_errors(each.made[i], made, each.before[i], before) for each in references]
    times = _NOISE_OF_HALVES if precision > torch.finfo(torch.float32).eps else _NOISE
    count = made.numel() if isinstance(made, Tensor) else 1
    ties = int(_TIES * precision * count) + times * max((each.exact for each in noise), default=0)
    if errors.exact > ties:
        return False
    if not errors.largest:
        return True
    relative, unit = _close(made)
    value, change = _errors(made, 0.0), _errors(made, 0.0 if before is None else before)
    mean = relative * change.mean + _ULPS * unit * value.mean
    largest = relative * _PEAK * change.largest + _ULPS * unit * value.largest
    if value.largest <= _SQUARES:
        times *= times
    mean += times * max((each.mean for each in noise), default=0.0)
    largest += times * max((each.largest for each in noise), default=0.0)
    return errors.mean <= mean and errors.largest <= largest


def _kind(item: Any) -> Any:
    return (item.dtype, item.shape) if isinstance(item, Tensor) else type(item)


def _close(expected: Any) -> tuple[float, float]:
    """Return which relative difference is small, and the unit in the last place."""
    dtype = expected.dtype if isinstance(expected, Tensor) else torch.float64
    if dtype.is_complex:
        dtype = dtype.to_real()
    return _CLOSE.get(dtype, 0.1), torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _errors(one: Any, other: Any, one_before: Any = None, other_before: Any = None) -> _Errors:
    """Return how two tensors or numbers differ, or how they have changed differently."""
    a, b = _numbers(one), _numbers(other)
    if not a.numel():
        return _Errors(0.0, 0.0, 0)
    if not a.is_floating_point() and not b.is_floating_point():
        return _Errors(0.0, 0.0, int((a != b).sum()))
    a, b = a.double(), b.to(a.device).double()
    finite = a.isfinite() & b.isfinite()
    alike = finite | (a == b) | (a.isnan() & b.isnan())
    difference = a - b
    if one_before is not None:
        difference = difference - (_numbers(one_before).double() - _numbers(other_before).double())
        finite = finite & difference.isfinite()
    difference = torch.where(finite, difference, 0.0)
    largest = float(difference.abs().max())
    mean = largest and float((difference / largest).square().mean().sqrt()) * largest
    return _Errors(mean, largest, int((~alike).sum()))


def _numbers(item: Any) -> Tensor:
    """Return the real numbers of a tensor, or of a number."""
    if not isinstance(item, Tensor):
        return torch.as_tensor(item, dtype=torch.float64 if isinstance(item, float) else None)
    item = item.detach()
    return torch.view_as_real(item.resolve_conj()) if item.is_complex() else item


def references(
    run: Callable[[Sequence[Any]], Results], args: Sequence[Any], precision: float
) -> list[Results]:
    """Return what rounding does to the results of ``run``, in two ways, as far as it can run.

    ``run`` may write to its arguments. ``args`` stay as they are; no random number is drawn.
    """
    made = []
    with contextlib.suppress(Exception):  # an operator has no kernel for double precision
        widened = [_wider(arg.detach().clone()) if isinstance(arg, Tensor) else arg for arg in args]
        with _Double():  # type: ignore[no-untyped-call]
            made.append(run(widened))
    single = torch.finfo(torch.float32).eps
    unit = max(precision if precision > single else _UNITS * precision, _LEAST_UNIT)
    generator = torch.Generator().manual_seed(0)
    with contextlib.suppress(Exception):
        made.append(run([_disturbed(arg, unit, generator) for arg in args]))
    return made


def _wider(leaf: Any) -> Any:
    """Return a tensor, or a dtype, in double precision."""
    if isinstance(leaf, Tensor):
        return leaf.to(_wider(leaf.dtype))
    if isinstance(leaf, torch.dtype) and (leaf.is_floating_point or leaf.is_complex):
        return torch.promote_types(leaf, torch.float64)
    return leaf


def _disturbed(arg: Any, unit: float, generator: torch.Generator) -> Any:
    """Return a copy changed by a unit in the last place, but for whole numbers, such as masks."""
    if not isinstance(arg, Tensor):
        return arg
    if not (arg.is_floating_point() or arg.is_complex()):
        return arg.detach().clone()
    wide = _wider(arg.detach())
    signs = torch.randint(0, 2, arg.shape, generator=generator) * 2 - 1
    signs = signs.to(arg.device, wide.dtype)
    changed = torch.where(wide == wide.real.round(), wide, wide * (1 + unit * signs))
    return torch.empty_like(arg).copy_(changed)


class _Double(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in double precision, also where operators are told another."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = transform(_wider_dtype, (tuple(args), dict(kwargs or {})))
        made = func(*args, **kwargs)
        if any(item.alias_info is not None for item in func._schema.returns):
            return made
        makes = any(item.name == "dtype" for item in func._schema.arguments)
        given = any(isinstance(leaf, Tensor) for leaf in flatten((args, kwargs)))
        if makes and not given:  # a factory, told no dtype
            return func(*args, **{**kwargs, "dtype": _wider(made.dtype)})
        return transform(_wider, made)


def _wider_dtype(leaf: Any) -> Any:
    return _wider(leaf) if isinstance(leaf, torch.dtype) else leaf
