"""Ends of communicators as groups of torch: what torch is asked for, and NCCL itself where there are GPUs."""

from __future__ import annotations

import os
import threading
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from autosched.runtime.ranks.nccl import _SETTINGS, Channel, NcclWire, nccl_communicator

PATIENCE = 60.0


class Group:
    """What ``torch.distributed.ProcessGroupNCCL`` has."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=None)

    def __init__(self, store: Any, rank: int, size: int, options: Any):
        self.asked = [rank, size, options.group_name, options.global_ranks_in_group]
        self.settings = {name: os.environ.get(name) for name in _SETTINGS}
        self.calls: list[Any] = []
        store.set("here", "")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(device)

    def send(self, rows: list[Any], peer: int, tag: int) -> None:
        self.calls.append(["send", len(rows), peer])

    def recv(self, rows: list[Any], peer: int, tag: int) -> None:
        self.calls.append(["recv", len(rows), peer])

    def abort(self) -> None:
        raise RuntimeError("NCCL error")


def test_an_end_of_a_communicator_is_a_group_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    store = torch.distributed.HashStore()
    device = torch.device("cuda", 1)
    made: Any = nccl_communicator(5, device, store, "of a test")(Channel(2, (3, 5, 9)))
    row = torch.zeros(1)
    made.send(row, 9)
    made.receive(row, 3)
    made.abort()
    assert made.group.asked == [1, 3, "colour 2 of 3, 5, 9", [3, 5, 9]]
    assert made.group.settings == _SETTINGS
    assert [os.environ.get(name) for name in _SETTINGS] == ["3", None]
    assert made.group.calls == [device, ["send", 1, 2], ["recv", 1, 0]]


@pytest.mark.cuda
def test_a_communicator_of_one_gpu_is_made_and_aborted_over_real_nccl() -> None:
    if torch.distributed.is_nccl_available():
        device = torch.device("cuda", 0)
        connect = nccl_communicator(0, device, torch.distributed.HashStore(), "of a test")
        connect(Channel(0, (0,))).abort()


@pytest.mark.multigpu
def test_gpus_of_one_process_exchange_rows_over_real_nccl() -> None:
    count = min(torch.accelerator.device_count(), 4)
    devices = [torch.device("cuda", number) for number in range(count)]
    arcs = list(permutations(range(count), 2))
    store = torch.distributed.HashStore()
    connects = [nccl_communicator(n, at, store, "of a test") for n, at in enumerate(devices)]
    wires = [NcclWire(number, connect) for number, connect in enumerate(connects)]

    def open_one(number: int) -> None:
        with torch.cuda.device(number):
            blank = partial(torch.zeros, 1, dtype=torch.uint8, device=devices[number])
            wires[number].open(arcs, blank)

    threads = [threading.Thread(target=open_one, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "NCCL hangs"
    for source, target in arcs:
        sent = torch.full((1 << 20,), 1 + source, dtype=torch.uint8, device=devices[source])
        received = torch.zeros_like(sent, device=devices[target])
        with torch.cuda.device(source):
            work = wires[source].send(sent, target)
        with torch.cuda.device(target):
            wires[target].receive(received, source).wait()
        with torch.cuda.device(source):
            work.wait()
        assert received.cpu().eq(1 + source).all()
    for wire in wires:
        wire.lose()
        wire.join()
