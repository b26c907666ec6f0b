"""Simulate GPUs on the CPU, by CUDA's rules for streams, events, memory and captured graphs.

    queues      streams as queues; the order in which their work runs
    hardware    the memory of GPUs, and what else they have
    tensors     tensors on GPUs: shapes at once, numbers later; operators and copies
    streams     what torch calls streams, events, graphs and generators
    allocator   the caching allocator: pools, and addresses that are handed out again
    autograd    backward passes, on the streams of forward passes
    autocast    casts in regions of autocast
    collectives collectives of torch.distributed
    comm        copies that torch.nn.parallel makes
    kernels     kernels of Triton and of extensions, by declarations
    observer    what happens, told to a reader
    generators  random numbers, also in graphs that are replayed
    fakes       fake tensors on simulated GPUs, for captures

``with playing(gpus=2, seed=3) as gpus:`` makes torch find two GPUs. The order in which streams
progress is the worst that a seeded adversary finds, so code that does not wait for what it needs
reads wrong data for some seed. Tensors are of torch's own types, so frontends, autograd and
optimizers run on them.

Not simulated: kernels that the CPU does not have, several processes, GPUs that cannot access each
other, and memory of a second GPU that a capture leaves unprotected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before it is replaced: it registers functions that are replaced here
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from autosched._lib.replacing import replaced
from autosched.errors import RealGPUsError
from autosched.runtime.backends import accelerator
from autosched.runtime.replay import cuda_graphs
from autosched.simulated_gpus import (
    autocast,
    autograd,
    collectives,
    comm,
    fakes,
    kernels,
    streams,
    tensors,
)
from autosched.simulated_gpus import hardware as _hardware
from autosched.simulated_gpus.hardware import Hardware

__all__ = ["Hardware", "playing"]


@contextlib.contextmanager
def playing(
    gpus: int = 1,
    seed: int = 0,
    nbytes: float = float("inf"),
    kind: str = "cuda",
    numbers: bool = True,
) -> Iterator[Hardware]:
    """Let torch find GPUs that are simulated on the CPU, in a ``with`` statement.

    They follow CUDA's rules for streams, events, memory and captured graphs, have ``nbytes`` of
    memory each, and progress in the worst order that an adversary with this ``seed`` finds. Those
    of another ``kind`` than "cuda" have no graphs. Without ``numbers``, operators compute shapes
    only. Raises RealGPUsError where torch finds a real
    GPU, and at the end AssertionError if memory was accessed after it had been freed.
    """
    if torch.accelerator.is_available() and not _hardware.current:
        raise RealGPUsError("torch finds a GPU: GPUs are simulated only where there is none")
    simulated = Hardware(gpus, seed, nbytes, kind, numbers)
    simulated.casts, simulated.collective = autocast.Casts(), collectives.call
    _hardware.current.append(simulated)
    own: tuple[tuple[Any, str, Any], ...] = (
        (accelerator, "_streams", {}),  # real ones live as long as the process
        (cuda_graphs, "_failed", []),
        (cuda_graphs, "_with_handles", threading.local()),
        (cuda_graphs, "_borrowed", tensors.borrowed),
        (threading.Thread, "start", tensors.knowing_streams(threading.Thread.start)),
        (threading.Thread, "run", tensors.in_mode(threading.Thread.run)),
    )
    try:
        declared = (*kernels.attributes(), *collectives.attributes())
        torchs = [(at, *item) for at, found in _torch(gpus, kind) for item in found.items()]
        switch = simulated.casts.switching(torch.set_autocast_enabled)
        own = (*own, *declared, *torchs)
        with replaced((torch, "set_autocast_enabled", switch), *own), tensors.Mode():
            yield simulated
    finally:
        collectives.end()
        simulated.close()
        simulated.casts.end()
        _hardware.current.remove(simulated)
    if simulated.faults:
        raise AssertionError("\n".join(simulated.faults))


def _named(names: str) -> dict[str, Any]:
    return {name: getattr(streams, name) for name in names.split()}


def _torch(gpus: int, kind: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return modules and classes of torch, with the attributes that they have while GPUs are simulated."""
    both = _named(
        "current_stream set_stream synchronize empty_cache memory_allocated memory_reserved "
        "memory_stats max_memory_allocated reset_peak_memory_stats"
    ) | {"is_available": lambda: True, "device_count": lambda: gpus}
    accelerators = both | {
        "current_accelerator": lambda check_available=False: torch.device(kind),
        "current_device_index": lambda: _hardware.hardware().device,
        "set_device_index": streams.set_device,
        "device_index": streams.device,
        "get_memory_info": streams.mem_get_info,
    }
    own = _named(
        "Stream set_device device device_of default_stream stream mem_get_info current_blas_handle "
        "manual_seed manual_seed_all get_rng_state set_rng_state is_current_stream_capturing"
    )
    facts = {"name": "a simulated GPU", "multi_processor_count": 1, "major": 9, "minor": 0}
    module = {**both, **own} | {
        "Event": streams.CudaEvent,
        "_sleep": streams.sleep,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: _hardware.hardware().device,
        "get_device_name": lambda device=None: facts["name"],
        "get_device_properties": lambda device=None: SimpleNamespace(
            total_memory=streams.mem_get_info(device)[1], **facts
        ),
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: device != peer,
        "default_generators": tuple(map(streams.default_generator, range(gpus))),
    }
    graphs = _named("graph graph_pool_handle use_mem_pool") | {"CUDAGraph": streams.Graph}
    told = {
        "range_push": lambda text: _hardware.hardware().ranges.append(f"push {text}"),
        "range_pop": lambda: _hardware.hardware().ranges.append("pop"),
        "mark": lambda text: _hardware.hardware().ranges.append(f"mark {text}"),
    }
    torch_c: dict[str, Any] = {"_group_tensors_by_device_and_dtype": tensors.grouped}
    owners: list[tuple[Any, dict[str, Any]]] = [*_classes(), (torch.accelerator, accelerators)]
    if kind != "cuda":
        return [*owners, (torch._C, torch_c), (getattr(torch, kind), module)]
    torch_c |= comm.FUNCTIONS | {
        "_cuda_clearCublasWorkspaces": streams.release_workspaces,
        "_cuda_beginAllocateCurrentThreadToPool": streams.begin_allocating,
        "_cuda_endAllocateToPool": streams.end_allocating,
        "_cuda_releasePool": streams.release_pool,
    }
    return [
        *owners,
        (torch._C, torch_c),
        (torch.cuda, module | graphs),
        (torch.cuda.graphs, {k: graphs[k] for k in graphs if hasattr(torch.cuda.graphs, k)}),
        (torch.cuda.nvtx, told),
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
        (torch.cuda.nccl, {"is_available": lambda tensors: False}),
        (torch.nn.parallel._functions, {"_streams": None, "torch": comm.Torch()}),
    ]


def _classes() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the attributes of torch itself, of its tensors, modes and engine."""
    run = torch.autograd.graph._engine_run_backward
    engine = {"_engine_run_backward": autograd.on_forward_streams(run)}
    yield torch.autograd, engine
    yield torch.autograd.graph, engine
    yield (
        torch,
        {
            "Stream": streams.Stream,
            "Event": streams.Event,
            "_has_compatible_shallow_copy_type": lambda one, other: True,
            **tensors.FROM_DATA,
            **tensors.MAKE,
        },
    )
    yield torch._C._nn, {"_parse_to": tensors.parse_to(torch._C._nn._parse_to)}
    yield torch.Tensor, tensors.METHODS | {"_make_subclass": fakes.make_subclass}
    yield fake_tensor, {"init_gpu_context": lambda device: None}
    yield FakeTensorMode, {"dispatch": fakes.on_gpus(FakeTensorMode.dispatch)}
    dispatch = fakes.on_gpus(ProxyTorchDispatchMode.__torch_dispatch__)
    yield ProxyTorchDispatchMode, {"__torch_dispatch__": dispatch}
