"""GPUs played on the CPU, where CUDA bites as it does on real ones: the accelerator backend is attacked with them.

``with playing(gpus=2, seed=3) as gpus:`` makes torch believe that there are two. Tensors on "cuda:0", streams, events,
copies, memory and captured graphs work by CUDA's rules, and the order in which streams go on is the
worst that a seeded adversary finds: see ``queues``, ``hardware``, ``tensors`` and ``streams``; and
``allocator``, ``libraries``, ``generators`` and ``timing`` for what torch and CUDA keep besides.

Tensors are of torch's own types, so frontends, autograd and optimizers run on them: ``fakes`` lets
captures, too.

What is not played: kernels that are not also the CPU's, several processes, GPUs that are no peers.
Autograd's engine stays in the calling thread and on its current streams, where a GPU's takes those of
forward. Nor is memory of a second GPU left unprotected in a capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # before anything is played: it registers functions that are replaced here

from autosched.runtime.backends import accelerator
from autosched.runtime.replay import cuda_graphs
from tests.gpu.fake_gpu import fakes, streams, tensors
from tests.gpu.fake_gpu import hardware as _hardware
from tests.gpu.fake_gpu.hardware import Hardware

__all__ = ["Hardware", "playing"]


@contextlib.contextmanager
def playing(
    gpus: int = 1, seed: int = 0, nbytes: float = float("inf"), kind: str = "cuda"
) -> Iterator[Hardware]:
    """Play GPUs of ``nbytes`` each; at the end fail if memory was touched after it had gone back.

    Those of another ``kind`` have no graphs.
    """
    if torch.accelerator.is_available() and not _hardware._playing:
        pytest.skip("GPUs are played only where there is none")
    played = Hardware(gpus, seed, nbytes, kind)
    with pytest.MonkeyPatch.context() as patch:
        _hardware._playing.append(played)
        for place, names in _torch(gpus, kind).items():
            for name, item in names.items():
                patch.setattr(f"{place}.{name}", item, raising=False)
        patch.setattr(accelerator, "_streams", {})  # real ones live as long as the process
        patch.setattr(cuda_graphs, "_failed", [])
        patch.setattr(cuda_graphs, "_with_handles", cuda_graphs._Handles())
        patch.setattr(cuda_graphs, "_borrowed", tensors.borrowed)
        patch.setattr(threading.Thread, "run", tensors.in_mode(threading.Thread.run))
        try:
            with tensors.Mode():
                yield played
        finally:
            played.close()
            _hardware._playing.pop()
    assert not played.faults, "\n".join(played.faults)


def _torch(gpus: int, kind: str) -> dict[str, dict[str, Any]]:
    """Return what stands in torch's modules while GPUs are played."""
    both = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "empty_cache": streams.empty_cache,
        "memory_allocated": streams.memory_allocated,
        "memory_reserved": streams.memory_reserved,
        "memory_stats": streams.memory_stats,
        "max_memory_allocated": streams.max_memory_allocated,
        "reset_peak_memory_stats": streams.reset_peak_memory_stats,
    }
    accelerator = both | {
        "current_accelerator": lambda check_available=False: torch.device(kind),
        "current_device_index": lambda: _hardware.hardware().device,
        "set_device_index": streams.set_device,
        "device_index": streams.device,
        "get_memory_info": streams.mem_get_info,
    }
    module = both | {
        "Stream": streams.Stream,
        "Event": streams.CudaEvent,
        "_sleep": streams.sleep,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: _hardware.hardware().device,
        "set_device": streams.set_device,
        "device": streams.device,
        "default_stream": streams.default_stream,
        "stream": streams.stream,
        "mem_get_info": streams.mem_get_info,
        "get_device_name": lambda device=None: "a played GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="a played GPU",
            total_memory=streams.mem_get_info(device)[1],
            multi_processor_count=1,
            major=9,
            minor=0,
        ),
        "can_device_access_peer": lambda device, peer: device != peer,
        "default_generators": tuple(map(streams.default_generator, range(gpus))),
        "current_blas_handle": streams.current_blas_handle,
        "manual_seed": streams.manual_seed,
        "manual_seed_all": streams.manual_seed_all,
        "get_rng_state": streams.get_rng_state,
        "set_rng_state": streams.set_rng_state,
    }
    graphs = {
        "CUDAGraph": streams.Graph,
        "graph": streams.graph,
        "graph_pool_handle": streams.graph_pool_handle,
        "use_mem_pool": streams.use_mem_pool,
        "is_current_stream_capturing": streams.is_current_stream_capturing,
    }
    told = {
        "range_push": lambda text: _hardware.hardware().ranges.append(f"push {text}"),
        "range_pop": lambda: _hardware.hardware().ranges.append("pop"),
        "mark": lambda text: _hardware.hardware().ranges.append(f"mark {text}"),
    }
    common = {
        "torch": {
            "Stream": streams.Stream,
            "Event": streams.Event,
            "_has_compatible_shallow_copy_type": lambda one, other: True,
        },
        "torch.Tensor": tensors.METHODS | fakes.METHODS,
        **fakes.MODES,
        "torch._C": {"_group_tensors_by_device_and_dtype": tensors.grouped},
        "torch.accelerator": accelerator,
        f"torch.{kind}": module,
    }
    if kind != "cuda":
        return common
    return common | {
        "torch.cuda": module | graphs,
        "torch.cuda.nvtx": told,
        "torch._C": common["torch._C"]
        | {
            "_cuda_clearCublasWorkspaces": streams.release_workspaces,
            "_cuda_beginAllocateCurrentThreadToPool": streams.begin_allocating,
            "_cuda_endAllocateToPool": streams.end_allocating,
            "_cuda_releasePool": streams.release_pool,
        },
    }
