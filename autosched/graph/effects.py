"""Determine which arguments a torch function writes or aliases.

This module also determines whether a function draws random numbers. It knows functions by name, and
ATen operators by their schemas. It never imports torch. Tables here cover what neither a name nor a
schema says. A function that is in no table reads its arguments and returns new memory.
``MAY_ALIAS`` lists the functions whose result can be their argument: treating a copy as a view is
safe.

A capture keeps in-place operators, and derives hazards from schemas and storages. A functional form
of the graph would have the same hazards, hidden in the copies at its end.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

from autosched._lib.code_names import names_in
from autosched._lib.tree import flatten
from autosched.graph.regions import is_basic

# Views that schemas do not mark.
_UNMARKED_VIEWS = frozenset(
    "_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk".split()
)
VIEWS = _UNMARKED_VIEWS | frozenset(
    "__getitem__ getitem T mT H mH real imag alias as_strided chunk detach diagonal expand "
    "expand_as hsplit vsplit dsplit movedim moveaxis narrow permute select slice split "
    "split_with_sizes tensor_split squeeze swapaxes swapdims t transpose adjoint unbind unflatten "
    "unfold unsqueeze view view_as view_as_real "
    "view_as_complex".split()
)
MAY_ALIAS = frozenset(
    "reshape reshape_as flatten contiguous ravel to type type_as float double half bfloat16 int "
    "long bool cpu cuda __pos__ to_dense atleast_1d atleast_2d atleast_3d broadcast_to positive "
    "resolve_conj resolve_neg conj conj_physical short char byte sum_to_size numpy from_numpy "
    "as_tensor asarray Identity Flatten "
    "Unflatten".split()
)

# Functions that write the running statistics in training, which their names do not show.
BATCH_NORMS = frozenset(
    "batch_norm cudnn_batch_norm instance_norm miopen_batch_norm native_batch_norm".split()
)

# Other such functions: the parameters up to the last one that is written, how many of them are
# written, and the parameter without which nothing is.
_ALSO_WRITES = {
    "embedding": ("input weight", 1, "max_norm"),  # torch.nn.functional.embedding
    "embedding_bag": ("input weight", 1, "max_norm"),
    "mkldnn_rnn_layer_backward": ("input " * 22 + "workspace", 1, ""),
    "rrelu_with_noise": ("input noise", 1, ""),
    "batch_norm_update_stats": ("input running_mean running_var", 2, ""),
    "batch_norm_gather_stats": ("input mean invstd running_mean running_var", 2, ""),
    "batch_norm_gather_stats_with_counts": ("input mean invstd running_mean running_var", 2, ""),
}
SET_ITEM = frozenset(("__setitem__", "setitem"))
IN_PLACE_OPERATORS = (
    frozenset(
        f"__i{name}__"
        for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
    )
    | SET_ITEM
)
RANDOM = frozenset(
    "AlphaDropout Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout RReLU kaiming_normal_ "
    "kaiming_uniform_ orthogonal_ sparse_ trunc_normal_ xavier_normal_ xavier_uniform_ "
    "alpha_dropout alpha_dropout_ dropout_ feature_alpha_dropout_ feature_dropout_ binomial "
    "native_dropout bernoulli bernoulli_ cauchy_ dropout dropout1d dropout2d dropout3d "
    "exponential_ feature_alpha_dropout feature_dropout fractional_max_pool2d "
    "fractional_max_pool3d geometric_ gumbel_softmax log_normal_ multinomial normal normal_ "
    "poisson rand rand_like randint randint_like randn "
    "randn_like random_ randperm rrelu rrelu_ scaled_dot_product_attention uniform_".split()
)
# These change the shape of their argument in place.
RESHAPE = frozenset("squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split())
# These give their argument other memory, or another view of it.
MOVE = frozenset("as_strided_ resize_ resize_as_ set_".split())
# These address the whole storage of their argument.
COUNTS_IN_MEMORY = frozenset("as_strided as_strided_copy as_strided_scatter".split())
_SEARCHED = (functools.partial, MethodType, FunctionType, list, tuple, set, frozenset, dict)
# Types from which nothing else is reachable.
_ATOMIC = frozenset({NoneType, bool, int, float, complex, str, bytes, type, ModuleType})
_MOST_ITEMS = 1000  # longest container that is searched; longer ones are data
# In F.batch_norm(x, mean, var, weight, bias, training, ...) and torch.batch_norm.
_TRAINING_ARGUMENT = 5
# Operators and modules that communicate with other processes, by namespace and by class.
COLLECTIVES = frozenset("_c10d_functional _c10d_functional_autograd _dtensor".split())
_COMMUNICATE = frozenset(
    "DistributedDataParallel FSDPModule FullyShardedDataParallel ProcessGroup SyncBatchNorm "
    "_Communication".split()
)
_UNINITIALIZED = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)


class _Communication:
    """Stands for all process groups of torch.distributed, as state that tasks share.

    Their collectives keep one order. If ranks had them in different orders, each would wait for the
    others forever, also where the groups differ.
    """


_COMMUNICATION = _Communication()


class Effects(NamedTuple):
    """The effects of a call: the arguments that it writes, the base of its result, and more."""

    name: str = ""  # in the tables; empty for functions that are not torch's
    writes: Sequence[Any] = ()
    base: Any = None
    view: bool = False  # a view of the base's memory, at no cost
    random: bool = False
    in_place: bool = False  # returns what it writes
    returned: Sequence[Any] = ()  # if in place, the written arguments that it returns; else all


def effects_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effects:
    """Return the effects of ``fn`` by torch's conventions; other functions have no known effects.

    >>> import operator
    >>> effects_of(operator.setitem, ["x", 0, 1.0], {}).writes
    ['x']
    """
    if fn is tuple:
        return Effects("unbind", base=_first(args, kwargs), view=True)
    home = _home(fn)
    if not home:
        return Effects()
    name = _raw_name(fn)
    if hasattr(fn, "_schema"):
        return _by_schema(fn, name, args, kwargs)
    writes = _written(name, args, kwargs, home in ("torch", "torch._ops.aten"))
    keys = args[1:] if name in ("__getitem__", "getitem") else ()
    # F.unfold is im2col, which is not a view.
    is_view = name in VIEWS and (home, name) != ("torch.nn.functional", "unfold")
    is_view = is_view and not any(map(_certainly_copies, keys))
    may_share = name in MAY_ALIAS and not kwargs.get("copy", False)
    shares = is_view or may_share or _is_idle_dropout(fn, name, args, kwargs)
    base = _first(args, kwargs) if shares else None
    free = is_view and all(map(is_basic, keys))
    in_place = bool(writes) and name not in BATCH_NORMS
    return Effects(name, writes, base, free, name in RANDOM, in_place)


def _home(fn: Callable[..., Any]) -> str:
    """Return the module of a function of torch, or of an operator or method; else nothing."""
    home = (
        getattr(fn, "__module__", None)
        or getattr(getattr(fn, "__objclass__", None), "__module__", None)
        or ""
    )
    known = home.partition(".")[0] in ("torch", "_operator") or home == "autosched.graph.value"
    return home if known else ""


def result_names(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names, or numbers, of results, if the schema of a torch function has several."""
    torch = sys.modules.get("torch")
    if fn is None or torch is None or not _home(fn):
        return ()
    method = getattr(torch.Tensor, _raw_name(fn), None)
    if FunctionType in (type(fn), type(method)):
        return ()  # Python code around the operator may return other results
    own = getattr(fn, "_schema", None)
    found = torch._C._jit_get_schemas_for_operator(f"aten::{_raw_name(fn)}")
    for schema in found if own is None else [own]:
        if len(schema.returns) > 1 and _fits(schema, args, kwargs):
            return tuple([item.name or str(i) for i, item in enumerate(schema.returns)])
    return ()


def _fits(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an overload may be the one that is called."""
    kinds = {"int": int, "str": str}
    parameters = schema.arguments
    required = sum(not item.has_default_value() for item in parameters)
    pairs = zip(parameters, args, strict=False)
    return (
        required <= len(args) + len(kwargs) <= len(parameters)
        and kwargs.keys() <= {"input", "axis", *(item.name for item in parameters)}
        and all(isinstance(item, kinds.get(str(known.type), object)) for known, item in pairs)
    )


def _by_schema(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effects:
    """Return the effects of an ATen operator by its schema, and by the tables for what it omits."""
    schema = fn._schema
    given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | dict(kwargs)
    marked = [
        (a.name, given.get(a.name), a.alias_info)
        for a in schema.arguments
        if a.alias_info is not None
    ]
    # Fused optimizers write gradients only where they are scaled.
    kept = "grads" if name.startswith("_fused_") and given.get("grad_scale") is None else ""
    written = [item for label, item, alias in marked if alias.is_write and label != kept]
    writes = [leaf for leaf in flatten(written) if leaf is not None]
    if name in BATCH_NORMS or name in _ALSO_WRITES:
        writes += _written(name, args, kwargs, True)
    returned = [item.alias_info for item in schema.returns]
    aliased = [item for _, item, alias in marked if not alias.is_write]
    base = _first(args, kwargs) if name in _UNMARKED_VIEWS else None
    if aliased and any(returned):
        base = aliased[0]
    random = name in RANDOM or any(str(t).endswith("nondeterministic_seeded") for t in fn.tags)
    if any(argument.name == "dropout_p" for argument in schema.arguments):
        random &= given.get("dropout_p", 0) != 0  # attention, which schemas say always draws
    in_place = bool(returned) and all(alias is not None and alias.is_write for alias in returned)
    view = base is not None and name in VIEWS
    own: list[Any] = []
    if in_place:
        sets = [alias.before_set for alias in returned]
        own = [i for _, i, alias in marked if any(alias.before_set & names for names in sets)]
    return Effects(name, writes, base, view, random, in_place, list(flatten(own)))


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], bare: bool) -> list[Any]:
    """Return the arguments that a torch function writes in place, by torch's conventions.

    These are: a name that ends in one underscore, ``inplace=True``, ``out=``, ``__setitem__`` and
    the batch norms.
    """
    written: list[Any] = []
    in_place = (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS
    if in_place or kwargs.get("inplace") is True:
        first = _first(args, kwargs)
        written.extend(first if name.startswith("_foreach_") else [] if first is None else [first])
    if name.startswith("_fused_"):
        # An optimizer's step writes parameters, moments and scaled gradients.
        plain = (bool, int, float, NoneType)
        written = [leaf for leaf in flatten(args) if not isinstance(leaf, plain)]
    if name in _ALSO_WRITES:
        names, count, condition = _ALSO_WRITES[name]
        parameters = dict(zip(names.split(), args, strict=False)) | dict(kwargs)
        if not condition or kwargs.get(condition) is not None or len(args) > 3:
            found = map(parameters.get, names.split()[-count:])
            written += [item for item in found if item is not None]
    out = kwargs.get("out")
    if out is not None:
        written.extend(out if isinstance(out, (tuple, list)) else [out])
    return written + (_statistics(args, kwargs, bare) if name in BATCH_NORMS else [])


def _statistics(args: Sequence[Any], kwargs: Mapping[str, Any], bare: bool) -> list[Any]:
    """Return the running statistics that a batch norm writes.

    In ``torch.batch_norm`` they follow weight and bias.
    """
    training = kwargs.get("training", kwargs.get("use_input_stats", True))
    if len(args) > _TRAINING_ARGUMENT:
        training = args[_TRAINING_ARGUMENT]
    position = 3 if bare else 1
    found = [*args[position : position + 2]]
    found += [kwargs.get(name) for name in ("running_mean", "running_var")[len(found) :]]
    return [value for value in found if training and value is not None]


def _is_idle_dropout(fn: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is an inactive dropout, which returns its argument."""
    given = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    training = given.get("training", given.get("train", getattr(fn, "training", True)))
    return "dropout" in name.lower() and (
        not training or given.get("p", getattr(fn, "p", 0.5)) == 0
    )


def _certainly_copies(key: Any) -> bool:
    """Whether an index certainly copies: a list does; a tensor of one number makes a view."""
    return any(isinstance(item, list) for item in (key if isinstance(key, tuple) else (key,)))


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument, which torch functions call ``input``."""
    return args[0] if args else kwargs.get("input")


def _raw_name(fn: Callable[..., Any]) -> str:
    """Return the name of ``fn`` in the tables; ``operator.and_`` is not an in-place method."""
    if getattr(fn, "__module__", None) == "_operator":
        return f"__{fn.__name__.strip('_')}__"
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if name == "__get__":  # a property of Tensor, such as T: its descriptor has the name
        name = getattr(getattr(fn, "__self__", None), "__name__", name)
    return str(name).partition(".")[0]  # an ATen overload is called mm.default


def function_name(fn: Callable[..., Any] | None) -> str:
    """Return the name of tasks made from ``fn``.

    >>> import operator
    >>> function_name(operator.matmul), function_name(lambda x: x)
    ('matmul', 'lambda')
    """
    if fn is None:
        return "task"
    name = _raw_name(fn)
    return (name if name.isidentifier() else re.sub(r"\W", "", name)).strip("_") or "task"


def counts_in_memory(task: Any) -> bool:
    """Whether a task, or one that it was merged from, addresses memory beyond its argument."""
    names = (function_name(part.fn) for part in task.with_parts() if part.fn)
    return any(name in COUNTS_IN_MEMORY for name in names)


def is_uninitialized(fn: Any) -> bool:
    """Whether the result of a function has uninitialised elements."""
    return _raw_name(fn) in _UNINITIALIZED


def shared_state(fn: Any, args: Iterable[Any]) -> list[Any]:
    """Return the modules, parameters, optimizers and generators that a task reaches.

    A task reaches them as its function; as an argument, closure, default or global of its function,
    or of a function of the same file; in a list, tuple, set or dict; or as an attribute of an
    object that it reaches. Running a module, even under ``functional_call``, may change it, so
    tasks that share one must not run at the same time. Nor may two that communicate with other
    processes: collectives of torch.distributed, tasks that reach a process group, or a module such
    as DistributedDataParallel.

    >>> shared_state(abs, [1.0])
    []
    """
    found: dict[int, Any] = {}
    if getattr(fn, "namespace", "") in COLLECTIVES:
        found[id(_COMMUNICATION)] = _COMMUNICATION
    seen: dict[int, Any] = {}  # holds references, so that no id is reused
    pending = [fn, *args]
    while pending:
        item = pending.pop()
        if type(item) not in _ATOMIC and id(item) not in seen:
            seen[id(item)] = item
            if _is_state(item):
                found.update((id(part), part) for part in _parts(item))
                pending += _within(item) if hasattr(type(item), "add_param_group") else ()
            else:
                pending += _reached(item)
    return list(found.values())


def _parts(state: Any) -> list[Any]:
    """Return the modules or parameters of a module or optimizer, which others may share."""
    if hasattr(type(state), "named_parameters"):
        modules = list(state.modules())
        others: list[Any] = [
            item for module in modules for item in module.parameters(recurse=False)
        ]
        if any(map(communicates, modules)):
            others.append(_COMMUNICATION)
        return modules + others
    if communicates(state):
        return [_COMMUNICATION]
    groups = state.param_groups if hasattr(type(state), "add_param_group") else ()
    return [state, *(parameter for group in groups for parameter in group["params"])]


def _reached(item: Any) -> Iterable[Any]:
    """Return the objects that are directly reachable from an item."""
    match item:
        case functools.partial():
            return [item.func, *item.args, *item.keywords.values()]
        case MethodType():
            return [item.__self__, item.__func__]
        case FunctionType():
            return [] if str(item.__module__).startswith("torch.") else _reached_by_call(item)
        case list() | tuple() | set() | frozenset() | dict():
            inside = item.values() if isinstance(item, dict) else item
            return inside if len(item) <= _MOST_ITEMS else ()
        case type() | ModuleType():  # subclasses; instances of atomic types were skipped
            return ()
    if hasattr(type(item), "data_ptr") or type(item).__module__.partition(".")[0] == "autosched":
        return ()
    return _within(item)


def _within(item: Any) -> list[Any]:
    """Return the attributes of an object that are state, or may contain some.

    Not their attributes, which could reach the whole program.
    """
    attributes = getattr(item, "__dict__", {})
    return [a for a in attributes.values() if _is_state(a) or isinstance(a, _SEARCHED)]


def _reached_by_call(fn: FunctionType) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in fn.__closure__ or () if cell != CellType())
    yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    for item in map(fn.__globals__.get, names_in(fn.__code__).globals):
        if not isinstance(item, FunctionType) or item.__module__ == fn.__module__:
            yield item


def _is_state(item: Any) -> bool:
    """Whether it is a module, optimizer or generator, by its class.

    An instance may answer to any attribute.
    """
    kind = type(item)
    return (
        (hasattr(kind, "named_parameters") and hasattr(kind, "modules"))
        or hasattr(kind, "add_param_group")
        or hasattr(kind, "manual_seed")
        or communicates(item)
    )


def communicates(item: Any) -> bool:
    """Whether an item of shared state is a process group, or a module that communicates."""
    return any(base.__name__ in _COMMUNICATE for base in type(item).__mro__)


def draws(state: Any) -> bool:
    """Whether an item of shared state is a module that draws random numbers."""
    rate = getattr(state, "dropout", 0)  # of recurrent networks and attention
    drops = type(state).__name__ in RANDOM or (isinstance(rate, (int, float)) and rate > 0)
    return drops and bool(getattr(state, "training", True))
