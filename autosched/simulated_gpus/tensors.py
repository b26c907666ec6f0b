"""Tensors of simulated GPUs: shapes now, numbers later.

A tensor of a GPU is one of torch's meta tensors whose storage has a block of the GPU's memory. So its
type is exactly torch's, views, in-place writes and autograd are torch's own, and its engine stays
in the calling thread. An operator is told to the current queue of its device: what it returns has
its shape at once, by torch's meta kernels, and NaN for numbers until the queue has come to it.
Copies are as ``aten/src/ATen/native/cuda/Copy.cu`` has them.

What only torch's C++ asks of a device is not simulated: ``copy_`` between devices of a tensor that
requires a gradient.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autosched.graph.effects import effects_of, is_uninitialized
from autosched.simulated_gpus.generators import Drawn, numbers
from autosched.simulated_gpus.hardware import Block, Hardware, Life, hardware
from autosched.simulated_gpus.hardware import device as device_named
from autosched.simulated_gpus.queues import Queue

aten = torch.ops.aten
_UntypedStorage: Any = torch.UntypedStorage
HOST, META = torch.device("cpu"), torch.device("meta")


def _place_of_address() -> int:
    """Return where in torch's C++ object of a storage the address of the memory is."""
    storage = torch.zeros(1).untyped_storage()
    places = range(0, 64, ctypes.sizeof(ctypes.c_void_p))
    read = ctypes.c_void_p.from_address
    return next(at for at in places if read(storage._cdata + at).value == storage.data_ptr())


_ADDRESS = _place_of_address()
_TensorBase: Any = torch._C.TensorBase
_is_meta = _TensorBase.is_meta.__get__


class _Asking(threading.local):
    """Whether this thread runs meta kernels, many of which are Python and ask tensors for their device."""

    for_shapes = False


_asking = _Asking()


def asks_for_shapes() -> bool:
    """Whether this thread runs an operator for its shapes alone."""
    return _asking.for_shapes


def _shaped(func: Any, call: tuple[Any, dict[str, Any]]) -> Any:
    """Call an operator on meta tensors."""
    _asking.for_shapes = True
    try:
        return func(*call[0], **call[1])
    finally:
        _asking.for_shapes = False


def block_of(item: Any) -> Any:
    """Return the block of a simulated GPU that a tensor is on; None for all else."""
    if not isinstance(item, torch.Tensor) or not _is_meta(item) or _asking.for_shapes:
        return None
    try:
        return getattr(item.untyped_storage(), "block", None)
    except NotImplementedError:  # sparse
        return None


def memory_of(item: Any) -> Any:
    """Return what a device has in the memory of a tensor, as a tensor of the CPU; all else as it is."""
    block = block_of(item)
    if block is None:
        return item
    made = torch.empty(0, dtype=item.dtype, device="cpu")
    made.set_(block.life.memory.storage, item.storage_offset(), item.shape, item.stride())
    made = made.conj() if item.is_conj() else made
    return torch._neg_view(made) if item.is_neg() else made


def _put_on(item: torch.Tensor, block: Any) -> torch.Tensor:
    """Let a meta tensor be one of a GPU; torch's own storage knows the address, as on a GPU."""
    storage = item.untyped_storage()
    storage.block = block  # type: ignore[attr-defined]
    field = ctypes.c_void_p.from_address(storage._cdata + _ADDRESS)
    field.value = block.life.memory.address
    return item


def _allocated(gpus: Hardware, queue: Queue, item: torch.Tensor, what: str) -> torch.Tensor:
    return _put_on(item, gpus.allocate(queue, item, what)[1])


class _Lent:
    """A block that belongs to others, who may have given it back."""

    def __init__(self, block: Block):
        self.queue, self.users = block.queue, block.users
        self.memory_known = block.memory_known
        self.life = Life(f"{block.life.what}, lent", block.life.memory)


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, which does not keep it from going back."""
    storage = _UntypedStorage(tensor.untyped_storage().nbytes(), device="meta")
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return _put_on(made, _Lent(block_of(tensor)))


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a thread needs for tensors that come into being on a simulated GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def in_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return ``Thread.run`` for threads that may make tensors on simulated GPUs."""

    def simulated(thread: threading.Thread) -> None:
        hardware().mine.started_under = getattr(thread, "started_under", None)
        with Mode():
            run(thread)

    return simulated


def knowing_streams(
    start: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    """Return ``Thread.start``, for threads that know the streams of whoever starts them."""

    def started(thread: threading.Thread) -> None:
        thread.started_under = tuple(hardware().current.values())  # type: ignore[attr-defined]
        start(thread)

    return started


# ---- what Python asks a tensor


class _Moved(torch.autograd.Function):
    """A copy on another device: its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, item: Any, facts: dict[str, Any]) -> Any:
        ctx.back = {"device": item.device, "dtype": item.dtype}
        return aten._to_copy.default(item, **facts)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.to(**ctx.back), None


def _to(item: Any, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """Stand for ``Tensor.to``."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = item.device if device is None else device, dtype or item.dtype
    kind = hardware().kind
    if device.type == kind:
        device = device_named(_index(device))
    if kind not in (device.type, item.device.type):
        return _PLAIN["to"](item, *args, copy=copy, **kwargs)
    straight = layout is None or item.is_contiguous(memory_format=layout)
    if (device, dtype) == (item.device, item.dtype) and straight and not copy:
        return item
    facts = {"device": device, "dtype": dtype, "non_blocking": non_blocking}
    facts |= {} if layout is None else {"memory_format": layout}
    moves = device != item.device and item.requires_grad and torch.is_grad_enabled()
    moved: Any = _Moved
    return moved.apply(item, facts) if moves else aten._to_copy.default(item, **facts)


def _copied(item: Any, memo: dict[int, Any]) -> Any:
    if id(item) not in memo:
        memo[id(item)] = item.detach().clone().requires_grad_(item.requires_grad)
    return memo[id(item)]


def _set_data(item: Any, value: torch.Tensor) -> None:
    """Stand for the assignment to ``Tensor.data``, which torch allows between the CPU and a GPU."""
    if _is_meta(item) == _is_meta(value):
        _data.__set__(item, value)
        return
    requires_grad, grad, item.grad = item.requires_grad, item.grad, None
    torch._C._swap_tensor_impl(item, value.detach().requires_grad_(requires_grad))
    item.grad = grad


_data = _TensorBase.data


def _record_stream(item: Any, stream: Any) -> None:
    block_of(item).users.append(stream.queue)


_PLAIN: dict[str, Any] = {
    name: getattr(torch.Tensor, name)
    for name in ("to", "tolist", "numpy", "__repr__", "__deepcopy__", "record_stream", "get_device")
}


def _either(name: str, played: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of tensors, for those of simulated GPUs."""

    def method(item: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = _PLAIN[name] if block_of(item) is None else played
        return chosen(item, *args, **kwargs)

    return method


def _device(item: Any) -> torch.device:
    block = block_of(item)
    return _cpp_device(item) if block is None else device_named(block.queue.device)


_cpp_device = _TensorBase.device.__get__


def _listed(item: Any) -> Any:
    """Stand for ``Tensor.tolist``."""
    on_host = _seen(item.detach(), "a list")
    with torch._C._DisableTorchDispatch():
        return _PLAIN["tolist"](on_host)


def _numpy(item: Any, **facts: Any) -> Any:
    """Stand for ``Tensor.numpy``, whose result is read by code that nobody sees."""
    if block_of(item) is None and item.device.type == "cpu":
        hardware().observer.called_on_host(aten.clone.default, (item,), {})
    return _PLAIN["numpy"](item, **facts)


def by_number(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes numbers for devices, which C++ takes for those of real accelerators."""

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = device_named(kwargs["device"])
        return make(*args, **kwargs)

    return made


METHODS: dict[str, Any] = {
    "device": property(_device),
    "is_cuda": property(lambda item: _device(item).type == "cuda"),
    "is_meta": property(lambda item: _device(item).type == "meta"),
    "data": property(_data.__get__, _set_data),
    "get_device": _either("get_device", lambda item: block_of(item).queue.device),
    "to": _to,
    "cpu": lambda item, **facts: item.to("cpu", **facts),
    "cuda": lambda item, device=None, non_blocking=False, **facts: item.to(
        device_named(_index("cuda" if device is None else device)),
        non_blocking=non_blocking,
        **facts,
    ),
    "tolist": _listed,
    "numpy": _numpy,
    **{
        name: by_number(getattr(torch.Tensor, name))
        for name in dir(torch.Tensor)
        if name.startswith("new_")
    },
    "record_stream": _either("record_stream", _record_stream),
    "__repr__": _either("__repr__", lambda item, **_: f"{item.detach().cpu()} on {item.device}"),
    "__deepcopy__": _either("__deepcopy__", _copied),
}


def _default_device() -> torch.device:
    """Return the device of new tensors, by the innermost ``with torch.device(...)``."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    found = (mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext))
    device: torch.device = next(found, HOST)
    return device


def _from_data(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a tensor of data, on a GPU by a copy from the host."""

    def made(data: Any, *args: Any, device: Any = None, **facts: Any) -> Any:
        device = device_named(device) if type(device) is int else device
        where = _default_device() if device is None else torch.device(device)
        if where.type != hardware().kind or (device is None and isinstance(data, torch.Tensor)):
            return make(data, *args, **facts, **({} if device is None else {"device": device}))
        requires_grad = facts.pop("requires_grad", False)
        if not isinstance(data, torch.Tensor) or block_of(data) is None:
            data = make(data, *args, device="cpu", **facts)
        return data.to(where).requires_grad_(requires_grad)

    return made


def parse_to(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return what reads the arguments of ``to``."""

    def parsed(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (device_named(args[0]), *args[1:])
        return by_number(parse)(*args, **kwargs)

    return parsed


FROM_DATA = {name: _from_data(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
_constructors: Any = _device_constructors
MAKE = {
    name: by_number(getattr(torch, name))
    for name in sorted({make.__name__ for make in _constructors()} - {*FROM_DATA})
    if hasattr(torch, name)
}


def grouped(lists: Any, with_indices: bool = False) -> Any:
    """Group the items of lists by the device and dtype of those of the first one, as torch's C++ does."""
    found: dict[Any, Any] = {}
    for number, first in enumerate(lists[0]):
        key = first.device, first.dtype
        items, indices = found.setdefault(key, ([[] for _ in lists], []))
        for group, each in zip(items, lists, strict=True):
            if each:
                group.append(each[number])
        indices.append(number)
    return {
        key: (items, indices if with_indices else []) for key, (items, indices) in found.items()
    }


# ---- operators


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do on the host what is the host's; else do as the GPU would."""
    leaves = tree_leaves((args, kwargs))
    if hardware().casts.has_any(leaves):
        with Mode():
            return hardware().casts.call(func, args, kwargs)
    if _captures() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return func(*args, **kwargs)  # torch's own modes come behind others
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    blocks = [block for leaf in leaves if (block := block_of(leaf)) is not None]
    if func.namespace == "c10d" and (blocks or hardware().has_group):
        return hardware().collective(func, args, kwargs)
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    if device == META:  # C++ takes tensors of a GPU for meta tensors, and asks for one like them
        if blocks:
            device = device_named(blocks[0].queue.device)
        elif _from_cpp(func):
            device = device_named(hardware().latest)
    if not blocks and (device is None or device.type != hardware().kind):
        return _on_host(func, args, kwargs)
    if device is not None and device.type == "cpu":
        return _on_host(func, tree_map(_shape_only, args), kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Mode():
            return func.decompose(*args, **kwargs)
    where = _index(device) if device is not None else blocks[0].queue.device
    return _on_gpu(hardware(), where, func, args, kwargs)


def _captures() -> bool:
    """Whether this thread makes fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _from_cpp(func: Any) -> bool:
    """Whether C++ asks for a tensor on a device, and not the user, who may well want a meta tensor."""
    return func is aten.scalar_tensor.default or torch._C._current_autograd_node() is not None


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    hardware().observer.called_on_host(func, args, kwargs)
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return hardware().pin(func(*args, **{**kwargs, "pin_memory": False}))


def _on_gpu(gpus: Hardware, device: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    gpus.latest = device
    args, kwargs = tree_map(lambda leaf: _brought(leaf, device, func), (args, kwargs))
    kwargs = {name: item for name, item in kwargs.items() if name != "pin_memory"}
    backward = getattr(gpus.mine, "backward", None)
    queue, returns = backward and backward.adds_on(device), func._schema.returns
    queue = queue or gpus.current[device]
    generator = kwargs.get("generator")
    host_call: Any = ((), {})
    if gpus.numbers:
        host_call = _with_device(tree_map(memory_of, (args, kwargs)), HOST)
    if generator is not None:
        kwargs = {**kwargs, "generator": None}
    on_meta = _with_device(tree_map(_shape_of_host, (args, kwargs)), META)
    blocks = [b for leaf in tree_leaves((args, kwargs)) if (b := block_of(leaf)) is not None]
    views = any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
    if views or func.overloadpacket is aten.set_:
        return _shaped(func, on_meta)
    try:
        results = _shaped(func, on_meta)
    except (NotImplementedError, RuntimeError) as error:
        if (
            torch.Tag.data_dependent_output not in func.tags
            and torch.Tag.dynamic_output_shape not in func.tags
        ):
            if isinstance(error, NotImplementedError):
                name = func.name().partition(".")[0]
                raise NotImplementedError(
                    f"{name} has no fake implementation, which tells the shapes of its results: "
                    f"give it one with torch.library.register_fake({name!r})"
                ) from error
            raise
        if not gpus.numbers:
            raise NotImplementedError(
                f"the shape of the result of {func} depends on numbers, which are not computed"
            ) from error
        gpus.synchronize(queue)  # the host must see numbers to know the shape
        found = _called(func, host_call)
        return tree_map(lambda leaf: _moved(gpus, leaf, device), found)
    if gpus.numbers and not _computes_on_cpu(func):
        raise NotImplementedError(
            f"{func} has no kernel for the CPU, which computes numbers: give it one with "
            f"torch.library.register_kernel({func.name()!r}, 'cpu', ...)"
        )
    made = tree_leaves(results)
    fresh = [
        n
        for n, leaf in enumerate(made)
        if isinstance(leaf, torch.Tensor) and block_of(leaf) is None
    ]
    for n in fresh:
        _allocated(gpus, queue, made[n], str(func))
    targets = [(n, memory_of(made[n])) for n in fresh] if gpus.numbers else []
    library = gpus.libraries.use(queue, func.name()) if gpus.libraries and gpus.numbers else []
    draws = torch.Tag.nondeterministic_seeded in func.tags
    drawn = gpus.draw(queue, generator) if draws else None
    shape = _shape_only(made[0]) if draws else None  # a tensor of the GPU would keep its memory

    def work() -> None:
        with torch.no_grad():
            found = _drawing(drawn, func, host_call, shape) if drawn else _called(func, host_call)
            leaves = tree_leaves(found)
            for n, target in targets:
                target.copy_(leaves[n])

    touched = [*blocks, *(block_of(made[n]) for n in fresh), *library]
    written = [] if is_uninitialized(func) else [made[n] for n in fresh]
    written += effects_of(func, args, kwargs).writes
    changed = {id(item) for item in written}
    read = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in changed]
    read = [] if _reads_shapes(func) else list(filter(block_of, read))
    gpus.launch(queue, str(func), work, touched, read, written)
    return results


def _computes_on_cpu(func: Any) -> bool:
    if func.namespace in ("aten", "prims"):
        return True  # some by way of others
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"))


def _reads_shapes(func: Any) -> bool:
    """Whether an operator makes a tensor like another, whose numbers it does not read."""
    name: str = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")


def _brought(leaf: Any, device: int, func: Any) -> Any:
    """Return an argument; one of the host's, if it may stand among the GPU's, with its numbers as they are now."""
    block = block_of(leaf)
    if block is not None:
        if block.queue.device != device and not _reads_shapes(func):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {leaf.device} and cuda:{device} in {func}"
            )
    elif isinstance(leaf, torch.Tensor) and leaf.device == HOST:
        if leaf.dim() and func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: cpu and cuda:{device} in {func}"
            )
        return leaf.clone()
    return leaf


def _called(func: Any, call: tuple[Any, dict[str, Any]]) -> Any:
    return func(*call[0], **call[1])


def _with_device(call: tuple[Any, dict[str, Any]], device: Any) -> tuple[Any, dict[str, Any]]:
    args, kwargs = call
    return args, {**kwargs, "device": torch.device(device)} if kwargs.get(
        "device"
    ) is not None else kwargs


def _shape_only(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _shape_of_host(leaf: Any) -> Any:
    return leaf if block_of(leaf) is not None else _shape_only(leaf)


def _drawing(drawn: Drawn, func: Any, call: tuple[Any, dict[str, Any]], shapes: Any) -> Any:
    """Call an operator with the numbers that it draws."""
    args, kwargs = call
    generator = numbers(drawn)
    if func.overloadpacket in _FILLED:
        blank = torch.empty_like(shapes, device="cpu")
        return getattr(blank, _FILLED[func.overloadpacket])(generator=generator)
    if func is aten.native_dropout.default:
        kept = torch.rand(args[0].shape, generator=generator) >= args[1]
        return args[0] * kept / (1 - args[1]), kept
    with_generator = getattr(func.overloadpacket, "generator", func)
    return with_generator(*args, **{**kwargs, "generator": generator})


_FILLED = {
    aten.rand: "uniform_",
    aten.rand_like: "uniform_",
    aten.randn: "normal_",
    aten.randn_like: "normal_",
}


# ---- copies


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return hardware().device if found.index is None else found.index


def _to_copy(
    source: Any, *, device: Any = None, dtype: Any = None, non_blocking: bool = False, **facts: Any
) -> Any:
    """Return a copy elsewhere, or of another type; on the host it is page-locked, if it is asked not to block."""
    gpus, device = hardware(), source.device if device is None else torch.device(device)
    if block_of(source) is None and device.type != gpus.kind:
        return _on_host(
            aten._to_copy.default, (source,), {"device": device, "dtype": dtype, **facts}
        )
    shape = aten._to_copy.default(
        _shape_only(source), dtype=dtype, memory_format=facts.get("memory_format")
    )
    if device.type == "cpu":
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        if non_blocking:
            gpus.pin(made)
        storage: Any = made.untyped_storage()
        storage.fill_(255 if gpus.numbers else 0)
        return _copy(made, source, non_blocking)
    made = _allocated(gpus, gpus.current[_index(device)], shape, "copy")
    return _copy(made, source, non_blocking)


def _moved(gpus: Hardware, leaf: Any, device: int) -> Any:
    """Return a tensor that the host holds as one of a device."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = _allocated(gpus, gpus.current[device], _shape_only(leaf), "a result")
    memory_of(made).copy_(leaf)
    return made


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy over a tensor, on the stream and with the waits that CUDA's copies have."""
    gpus = hardware()
    to, of = block_of(target) is not None, block_of(source) is not None
    if to and of:
        _between_gpus(gpus, target, source)
    elif not to and not of:
        _on_host(aten.copy_.default, (target, source), {})
    elif _is_plain(target, source):
        (_from_host if to else _to_host)(gpus, target, source, non_blocking)
    else:
        _by_temporaries(target, source, non_blocking)
    return target


def _is_plain(target: Any, source: Any) -> bool:
    """Whether a copy is one of bytes in a row."""
    steps = zip(target.shape, target.stride(), source.stride(), strict=False)
    alike = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and all(a == b for n, a, b in steps if n > 1)
    )
    dense = torch.ops.aten.is_non_overlapping_and_dense.default
    shapes = _shape_only(target), _shape_only(source)
    return alike and (target.numel() < 2 or all(map(dense, shapes)))


def _by_temporaries(target: Any, source: Any, non_blocking: bool) -> None:
    """Convert and straighten on the GPU if it must not block, else on the CPU, in memory that is not page-locked."""
    converts_here = (block_of(source) is not None) == non_blocking
    with Mode():
        if converts_here:
            straight = target if target.is_contiguous() else _blank(target, target.dtype)
            given = source.to(target.dtype).expand(target.shape).contiguous()
        else:
            fits = target.is_contiguous() and target.dtype == source.dtype
            straight = target if fits else _blank(target, source.dtype)
            given = source.expand(target.shape).contiguous()
        straight.copy_(given, non_blocking=non_blocking)
        if straight is not target:
            target.copy_(straight, non_blocking=non_blocking)


def _blank(like: Any, dtype: torch.dtype) -> Any:
    made = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    if block_of(made) is None and not hardware().numbers:
        made.zero_()  # as all that comes from a GPU then
    return made


def _put_copy(
    gpus: Hardware, queue: Queue, what: str, target: Any, source: Any, *, staged: bool = False
) -> None:
    blocks = [block for item in (target, source) if (block := block_of(item)) is not None]
    work: Any = None
    if gpus.numbers:
        memory, given = memory_of(target), memory_of(source)
        work = partial(memory.copy_, given)
    gpus.launch(queue, what, work, blocks, [] if staged else [source], [target])


def _between_gpus(gpus: Hardware, target: Any, source: Any) -> None:
    """Copy on the source's current stream, between which and the destination's stands a barrier both ways."""
    one, other = (gpus.current[block_of(item).queue.device] for item in (source, target))
    if one.device == other.device:
        return _put_copy(gpus, one, "copy", target, source)
    for queue in (one, other):
        if queue.capture is not None:
            gpus.forbid("a copy between GPUs", queue)
    gpus.wait(one, gpus.record(other), asked=False)
    _put_copy(gpus, one, "copy between GPUs", target, source)
    gpus.wait(other, gpus.record(one), asked=False)
    return None


def _from_host(gpus: Hardware, target: Any, source: torch.Tensor, non_blocking: bool) -> None:
    queue, pinned = gpus.current[block_of(target).queue.device], gpus.is_pinned(source)
    if not (pinned and non_blocking):
        gpus.forbid("a copy from pageable memory, or one that blocks", queue)
    if not pinned:  # staged: the host may go on before the copy is done, and write over it
        gpus.observer.called_on_host(aten.clone.default, (source,), {})
        source = source.clone() if gpus.numbers else source
    _put_copy(gpus, queue, "copy from the host", target, source, staged=not pinned)
    if not non_blocking:
        gpus.synchronize(queue)


def _to_host(gpus: Hardware, target: torch.Tensor, source: Any, non_blocking: bool) -> None:
    queue = gpus.current[block_of(source).queue.device]
    asynchronous = non_blocking and gpus.is_pinned(target)
    if not asynchronous:
        gpus.forbid("a copy to pageable memory, or one that blocks", queue)
    _put_copy(gpus, queue, "copy to the host", target, source)
    if not asynchronous:
        gpus.synchronize(queue)


# ---- what the host asks


def _read(item: Any) -> Any:
    """Return a number: the host waits for it."""
    return aten._local_scalar_dense.default(_seen(item, "a number"))


def _seen(item: Any, what: str) -> Any:
    """Return what a tensor has in its memory, when the host has waited for it; zeros if no numbers are computed."""
    gpus, block = hardware(), block_of(item)
    if block is None:
        gpus.observer.called_on_host(aten._local_scalar_dense.default, (item,), {})
        return item
    queue = gpus.current[block.queue.device]
    gpus.observer.launched(queue, f"{what} for the host", [item], [])
    gpus.synchronize(queue)
    if gpus.numbers:
        return memory_of(item)
    gpus.observer.numbers_read(what)
    return torch.zeros(item.shape, dtype=item.dtype, device="cpu")


def _equal(a: Any, b: Any) -> bool:
    if a.device != b.device:
        raise RuntimeError("Expected all tensors to be on the same device")
    one, other = _seen(a, "a comparison"), _seen(b, "a comparison")
    return bool(aten.equal.default(one, other))


def _is_pinned(item: Any, device: Any = None) -> bool:
    return block_of(item) is None and hardware().is_pinned(item)


def _pinned(item: Any, device: Any = None) -> torch.Tensor:
    return hardware().pin(item.clone())


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _read,
    aten.equal.default: _equal,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pinned,
}
