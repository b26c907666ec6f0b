"""Write the state of a step to a folder, and read it, by torch.distributed.checkpoint.

Each rank writes what its part of the state has: what several ranks have under one name is written
once. Whoever reads a checkpoint reads all of it, so it may have been written by another number of
ranks.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autosched import MachineError

_GROUPS = "param_groups"


def write(folder: str | os.PathLike[str], state: Mapping[str, Any], alone: bool) -> None:
    """Write a step's state to a folder; a collective call, unless one process is ``alone``."""
    from torch.distributed.checkpoint.state_dict_saver import save

    optimizer = state["optimizer"]
    groups = {str(number): group for number, group in enumerate(optimizer[_GROUPS])}
    with _checked(alone):
        named = {**state, "optimizer": {**optimizer, _GROUPS: groups}}
        save(named, checkpoint_id=folder, no_dist=alone)


def read(folder: str | os.PathLike[str], alone: bool) -> dict[str, Any]:
    """Return the state that ``write`` has written, of all ranks, on the CPU.

    A collective call, unless one process is ``alone``.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(Path(folder))
    metadata = reader.read_metadata()
    flat = {name: _empty(item) for name, item in metadata.state_dict_metadata.items()}
    with _checked(alone):
        load(flat, storage_reader=reader, no_dist=alone)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, _GROUPS: {}}, "residuals": {}}
    for name, item in flat.items():
        *above, last = metadata.planner_data[name]
        node = state
        for key in above:
            node = node.setdefault(key, {})
        node[last] = item
    optimizer = state["optimizer"]
    groups = [optimizer[_GROUPS][key] for key in sorted(optimizer[_GROUPS], key=int)]
    moments = {int(number): item for number, item in optimizer["state"].items()}
    return {**state, "optimizer": {"state": moments, _GROUPS: groups}}


def own_residuals(
    residuals: Mapping[str, torch.Tensor], is_here: Sequence[bool]
) -> dict[str, torch.Tensor]:
    """Return the residuals of compression for those replicas that are here; warn of others."""
    numbers = {name: int(name.rpartition(".")[2]) for name in residuals}  # of replicas
    if any(number >= len(is_here) for number in numbers.values()):
        what = f"there are {len(is_here)} replicas, and residuals of {1 + max(numbers.values())}"
        warnings.warn(f"{what}: those of the others are dropped", RuntimeWarning, stacklevel=3)
    own = {name for name, number in numbers.items() if number < len(is_here) and is_here[number]}
    return {name: tensor for name, tensor in residuals.items() if name in own}


def _empty(item: Any) -> Any:
    """Return a tensor to read into; None for what is no tensor."""
    is_tensor = hasattr(item, "size")
    return torch.empty(item.size, dtype=item.properties.dtype) if is_tensor else None


@contextlib.contextmanager
def _checked(alone: bool) -> Iterator[None]:
    """Raise MachineError where several ranks have no default group; silence torch where one is alone."""
    if not alone and not torch.distributed.is_initialized():
        what = "checkpoints of several ranks need the default group of torch.distributed"
        raise MachineError(f"{what}; call torch.distributed.init_process_group")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
