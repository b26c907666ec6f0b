"""The accelerators of each rank, and how ranks exchange what is on them."""

import contextlib
import json

import pytest
import torch

import autosched as asc
from autosched.machine import cluster
from autosched.machine.cluster import described, joining, own_share
from autosched.machine.device import Network
from tests.gpu.fake_gpu import playing

NETWORK = Network(1e9)


def shares(monkeypatch, count, size, gpus=None):
    """The physical devices of each of so many ranks on a host with ``count`` GPUs."""
    found = []
    with playing(count) if count else contextlib.nullcontext():
        for rank in range(size):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
            machine = own_share(gpus, 1)
            found.append([at for at in machine.physical.values() if at])
    return found


@pytest.mark.parametrize(
    ("count", "size", "gpus", "expected"),
    [
        (0, 2, None, [[], []]),
        (2, 2, None, [["cuda:0"], ["cuda:1"]]),
        (1, 2, None, [["cuda:0"], ["cuda:0"]]),
        (5, 2, None, [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]),
        (2, 3, None, [["cuda:0"], ["cuda:1"], ["cuda:0"]]),
        (1, 2, 2, [["cuda:0"] * 2] * 2),
        (4, 2, 1, [["cuda:0"], ["cuda:1"]]),
        (2, 2, 0, [[], []]),
    ],
)
def test_processes_of_a_host_have_equal_shares_of_its_gpus(
    monkeypatch, count, size, gpus, expected
):
    assert shares(monkeypatch, count, size, gpus) == expected


def test_without_torchrun_the_current_gpu_is_taken(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with playing(3):
        torch.accelerator.set_device_index(2)
        assert own_share(None, 1).physical == {"cpu": None, "cuda:2": "cuda:2"}


def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch):
    with playing(1, nbytes=1 << 30):
        whole = own_share(None, 1).device("cuda:0").nbytes
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        half = own_share(None, 1)
        assert half.device(half.accelerators[0]).nbytes == whole / 2


def test_no_gpu_is_an_error_where_one_is_wanted():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(asc.MachineError, match="this machine has no accelerator, but gpus=1"):
        own_share(1, 1)


def rank(*gpus, nccl=True):
    return {"gpus": list(gpus), "nccl": nccl}


@pytest.mark.parametrize(
    ("hosts", "ranks", "why"),
    [
        ("aa", [rank("0"), rank("0")], "devices of ranks 0 and 1 share a GPU of host a"),
        ("ab", [rank("0"), rank("0", "1")], "rank 1 has several"),
        ("ab", [rank("0"), rank("0", nccl=False)], "torch of rank 1 has no NCCL"),
    ],
)
def test_copies_go_by_way_of_the_hosts_where_nccl_cannot_be_used(hosts, ranks, why):
    network, said = joining(NETWORK, False, hosts, ranks)
    assert not network.direct
    assert said.startswith(why)
    with pytest.raises(asc.MachineError, match=why):
        joining(Network(1e9, direct=True), True, hosts, ranks)
    assert joining(NETWORK, True, hosts, ranks) == (NETWORK, "")


@pytest.mark.parametrize(
    ("hosts", "ranks", "direct"),
    [
        ("aa", [rank("0"), rank("1")], True),
        ("ab", [rank("0"), rank("0")], True),
        ("abb", [rank("0"), rank(nccl=False), rank("0")], True),
        ("aabb", [rank("0"), rank("1"), rank("0"), rank()], True),
        ("ab", [rank("0"), rank()], False),
        ("ab", [rank(), rank()], False),
    ],
)
def test_ranks_with_gpus_of_their_own_exchange_directly(hosts, ranks, direct):
    network, why = joining(NETWORK, False, hosts, ranks)
    assert network.direct == direct
    assert not why


def test_a_cluster_has_the_accelerators_of_all_ranks():
    with playing(2):
        texts = []
        for _ in range(2):
            local = asc.Machine.local(gpus=1)
            mine = {"versions": {}, "host": "a", "machine": local.to_json()}
            texts.append(json.dumps({**mine, **described(local)}))
        machine, why = cluster._gathered(texts, None, False)
    assert why  # they share a GPU, and there may be no NCCL
    assert machine.names == ("cpu:0", "cuda:0", "cpu:1", "cuda:1")
    assert machine.physical["cuda:1"] == "cuda:0"
    assert machine.route("cuda:0", "cuda:1") == ("cuda:0", "cpu:0", "cpu:1", "cuda:1")
