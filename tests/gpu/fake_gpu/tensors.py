"""Tensors of played GPUs: shapes now, numbers later.

A tensor wraps memory of the CPU. An operator on it is told to the current queue of its device: what
it returns has its shape at once, by torch's meta kernels, and NaN for numbers until the queue has
come to it. Views are taken at once. Copies are as ``aten/src/ATen/native/cuda/Copy.cu`` has them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.fake_gpu.generators import Drawn, numbers
from tests.gpu.fake_gpu.hardware import Block, Hardware, Life, hardware
from tests.gpu.fake_gpu.queues import Queue

aten = torch.ops.aten
HOST = torch.device("cpu")


def _place_of_address() -> int:
    """Return where in torch's C++ object of a storage the address of the memory is."""
    storage = torch.zeros(1).untyped_storage()
    places = range(0, 64, ctypes.sizeof(ctypes.c_void_p))
    read = ctypes.c_void_p.from_address
    return next(at for at in places if read(storage._cdata + at).value == storage.data_ptr())


_ADDRESS = _place_of_address()


class Played(torch.Tensor):
    """A tensor on a played GPU."""

    memory: torch.Tensor  # of the CPU: what the device has in it
    block: Block

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: Block) -> Played:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device("cuda", block.queue.device),
        )
        self.block = block
        self.take(memory)
        return self

    def take(self, memory: torch.Tensor) -> None:
        """Have other memory; torch's own storage knows the address, as on a GPU."""
        self.memory = memory
        field = torch.Tensor.untyped_storage(self)._cdata + _ADDRESS
        ctypes.c_void_p.from_address(field).value = memory.untyped_storage().data_ptr()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"{self.cpu()} on {self.device}"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def record_stream(self, stream: Any) -> None:
        self.block.users.append(stream.queue)


class _Lent:
    """A block that belongs to others, who may have given it back."""

    def __init__(self, block: Block):
        self.queue, self.users = block.queue, block.users
        self.life = Life(f"{block.life.what}, lent", block.life.memory)


def borrowed(tensor: Played) -> Played:
    """Return a tensor on the same memory, which does not keep it from going back."""
    return Played(tensor.memory, _Lent(tensor.block))  # type: ignore[arg-type]


class Mode(TorchDispatchMode):
    """What a thread needs for tensors that come into being on a played GPU."""


def _dispatch(self: Mode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return dispatch(func, args, kwargs or {})


Mode.__torch_dispatch__ = (
    _dispatch  # set afterwards, or torch would import all of Dynamo to keep it out
)


def in_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return ``Thread.run`` for threads that may make tensors on played GPUs."""

    def played(thread: threading.Thread) -> None:
        with Mode():
            run(thread)

    return played


# ---- operators


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do on the host what is the host's; else do as the GPU would."""
    if func in _SPECIAL:
        return _SPECIAL[func](*args, **kwargs)
    played = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Played)]
    device = kwargs.get("device")
    if device is None and not played:
        return _on_host(func, args, kwargs)
    if device is not None and torch.device(device).type == "cpu":
        return _on_host(func, tree_map(_shape_only, args), kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Mode():
            return func.decompose(*args, **kwargs)
    where = _index(device) if device is not None else played[0].block.queue.device
    return _on_gpu(hardware(), where, func, args, kwargs)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return hardware().pin(func(*args, **{**kwargs, "pin_memory": False}))


def _on_gpu(gpus: Hardware, device: int, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map(lambda leaf: _brought(leaf, device, func), (args, kwargs))
    kwargs = {name: item for name, item in kwargs.items() if name != "pin_memory"}
    queue, returns = gpus.current[device], func._schema.returns
    host_call = _with_device(tree_map(_memory, (args, kwargs)), HOST)
    generator = kwargs.get("generator")
    if generator is not None:
        kwargs = {**kwargs, "generator": None}
    blocks = [leaf.block for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Played)]
    if any(item.alias_info is not None and not item.alias_info.is_write for item in returns):
        views = _called(func, host_call)
        return tree_map(lambda leaf: Played(leaf, blocks[0]), views)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    try:
        shapes = _called(func, _with_device(tree_map(_shape_only, (args, kwargs)), "meta"))
    except (NotImplementedError, RuntimeError) as error:
        if (
            torch.Tag.data_dependent_output not in func.tags
            and torch.Tag.dynamic_output_shape not in func.tags
        ):
            if isinstance(error, NotImplementedError):
                raise NotImplementedError(f"{func} cannot be played: {error}") from error
            raise
        gpus.synchronize(queue)  # the host must see numbers to know the shape
        found = _called(func, host_call)
        return tree_map(lambda leaf: _moved(gpus, leaf, device), found)
    written = _written(func, args, kwargs)
    fresh: list[tuple[int, Played]] = []

    def made_of(number: int, shape: Any) -> Any:
        if not isinstance(shape, torch.Tensor):
            return shape
        if number in written:
            return written[number]
        memory, block = gpus.allocate(queue, shape, str(func))
        fresh.append((len(fresh), Played(memory, block)))
        return fresh[-1][1]

    results: Any
    if isinstance(shapes, (tuple, list)) and len(returns) > 1:
        results = tuple(
            tree_map(lambda leaf, n=n: made_of(n, leaf), shape) for n, shape in enumerate(shapes)
        )
    else:
        results = tree_map(lambda leaf: made_of(0, leaf), shapes)
    library = gpus.libraries.use(queue, func.name().partition(".")[0])
    drawn = gpus.draw(queue, generator) if draws else None
    targets = [item.memory for _, item in fresh]

    def work() -> None:
        with torch.no_grad():
            found = _drawing(drawn, func, host_call, shapes) if drawn else _called(func, host_call)
            given = [leaf for n, leaf in _numbered(found, len(returns)) if n not in written]
            for target, leaf in zip(targets, given, strict=True):
                target.copy_(leaf)

    touched = [*blocks, *(item.block for _, item in fresh), *library]
    gpus.launch(queue, str(func), work, touched)
    return results


def _brought(leaf: Any, device: int, func: Any) -> Any:
    """Return an argument; one of the host's, if it may stand among the GPU's, with its numbers as they are now."""
    if isinstance(leaf, Played):
        if leaf.block.queue.device != device:
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


def _memory(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, Played) else leaf


def _shape_only(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[int, Any]:
    """Return which results, by number, are arguments that it writes."""
    schema, found = func._schema, {}
    given = {
        argument.name: item for argument, item in zip(schema.arguments, args, strict=False)
    } | kwargs
    for number, item in enumerate(schema.returns):
        if item.alias_info is not None:
            names = item.alias_info.before_set
            found[number] = next(
                given[a.name]
                for a in schema.arguments
                if a.alias_info is not None and a.alias_info.before_set == names
            )
    return found


def _numbered(results: Any, count: int) -> Iterable[tuple[int, torch.Tensor]]:
    """Yield the tensors that an operator returns, with the number of the return that they belong to."""
    for n, item in enumerate(results if count > 1 else [results]):
        yield from ((n, leaf) for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor))


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
    found = torch.device(device)
    return hardware().device if found.index is None else found.index


def _to_copy(
    source: Any, *, device: Any = None, dtype: Any = None, non_blocking: bool = False, **facts: Any
) -> Any:
    """Return a copy elsewhere, or of another type; on the host it is page-locked, if it is asked not to block."""
    gpus, device = hardware(), source.device if device is None else torch.device(device)
    if not isinstance(source, Played) and device == HOST:
        return aten._to_copy.default(source, device=device, dtype=dtype, **facts)
    shape = aten._to_copy.default(
        _shape_only(source), dtype=dtype, memory_format=facts.get("memory_format")
    )
    if device.type == "cpu":
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        if non_blocking:
            gpus.pin(made).untyped_storage().fill_(255)
        return _copy(made, source, non_blocking)
    queue = gpus.current[_index(device)]
    return _copy(Played(*gpus.allocate(queue, shape, "a copy")), source, non_blocking)


def _moved(gpus: Hardware, leaf: Any, device: int) -> Any:
    """Return a tensor that the host holds as one of a device."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    memory, block = gpus.allocate(gpus.current[device], leaf, "a result")
    memory.copy_(leaf)
    return Played(memory, block)


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy over a tensor, on the stream and with the waits that CUDA's copies have."""
    gpus = hardware()
    if isinstance(target, Played) and isinstance(source, Played):
        _between_gpus(gpus, target, source)
    elif not isinstance(target, Played) and not isinstance(source, Played):
        aten.copy_.default(target, source)
    elif _is_plain(target, source):
        (_from_host if isinstance(target, Played) else _to_host)(gpus, target, source, non_blocking)
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
    return alike and (target.numel() < 2 or (dense(_memory(target)) and dense(_memory(source))))


def _by_temporaries(target: Any, source: Any, non_blocking: bool) -> None:
    """Convert and straighten on the GPU if it must not block, else on the CPU, in memory that is not page-locked."""
    converts_here = isinstance(source, Played) == non_blocking
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
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _put_copy(gpus: Hardware, queue: Queue, what: str, target: Any, source: Any) -> None:
    memory, given = _memory(target), _memory(source)
    blocks = [item.block for item in (target, source) if isinstance(item, Played)]
    gpus.launch(queue, what, lambda: memory.copy_(given), blocks)


def _between_gpus(gpus: Hardware, target: Played, source: Played) -> None:
    """Copy on the source's current stream, between which and the destination's stands a barrier both ways."""
    one, other = gpus.current[source.block.queue.device], gpus.current[target.block.queue.device]
    if one.device == other.device:
        return _put_copy(gpus, one, "copy", target, source)
    for queue in (one, other):
        if queue.capture is not None:
            gpus.forbid("a copy between GPUs", queue)
    gpus.wait(one, gpus.record(other))
    _put_copy(gpus, one, "copy between GPUs", target, source)
    gpus.wait(other, gpus.record(one))
    return None


def _from_host(gpus: Hardware, target: Played, source: torch.Tensor, non_blocking: bool) -> None:
    queue, pinned = gpus.current[target.block.queue.device], gpus.is_pinned(source)
    if not (pinned and non_blocking):
        gpus.forbid("a copy from pageable memory, or one that blocks", queue)
    if (
        not pinned
    ):  # staged: the host may go on before the copy is done, and write over what it gave
        source = source.clone()
    _put_copy(gpus, queue, "copy from the host", target, source)
    if not non_blocking:
        gpus.synchronize(queue)


def _to_host(gpus: Hardware, target: torch.Tensor, source: Played, non_blocking: bool) -> None:
    queue = gpus.current[source.block.queue.device]
    asynchronous = non_blocking and gpus.is_pinned(target)
    if not asynchronous:
        gpus.forbid("a copy to pageable memory, or one that blocks", queue)
    _put_copy(gpus, queue, "copy to the host", target, source)
    if not asynchronous:
        gpus.synchronize(queue)


# ---- what the host asks


def _read(item: Any) -> Any:
    """Return a number: the host waits for it."""
    if isinstance(item, Played):
        hardware().synchronize(hardware().current[item.block.queue.device])
    return aten._local_scalar_dense.default(_memory(item))


def _equal(a: Any, b: Any) -> bool:
    for item in (a, b):
        if isinstance(item, Played):
            hardware().synchronize(hardware().current[item.block.queue.device])
    if a.device != b.device:
        raise RuntimeError("Expected all tensors to be on the same device")
    return aten.equal.default(_memory(a), _memory(b))


def _is_pinned(item: Any, device: Any = None) -> bool:
    return not isinstance(item, Played) and hardware().is_pinned(item)


def _pinned(item: Any, device: Any = None) -> torch.Tensor:
    return hardware().pin(item.clone())


_SPECIAL = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._local_scalar_dense.default: _read,
    aten.equal.default: _equal,
    aten.is_pinned.default: _is_pinned,
    aten._pin_memory.default: _pinned,
}
