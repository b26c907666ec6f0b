"""Machines of several ranks: names, networks, ways between devices, JSON, messages, and shares of GPUs."""

import contextlib
import itertools
import math
import re

import pytest
import torch

import autosched as asc
from autosched.machine import cluster
from autosched.machine.cluster import described, joining, own_share
from autosched.machine.device import NETWORKS, Network
from autosched.machine.machine import Device, Link, Machine
from autosched.simulated_gpus import playing


def test_devices_are_numbered_over_all_ranks():
    machine = Machine.emulated(2, hosts=3)
    assert machine.names[3:6] == ("cpu:1", "cuda:2", "cuda:3")
    assert machine.ranks["cuda:3"] == 1
    assert {device.host for device in machine.devices} == {"host 0", "host 1", "host 2"}
    assert machine.host == "cpu:0"


def test_a_network_joins_the_cpus_and_links_join_the_devices_of_a_host():
    machine = Machine.emulated(1, hosts=2, network="infiniband400")
    between = machine.link("cpu:0", "cpu:1")
    assert (between.bytes_per_second, between.latency) == NETWORKS["infiniband400"]
    assert machine.link("cpu:0", "cuda:0") is not None
    assert machine.link("cpu:0", "cuda:1") is None
    assert machine.link("cuda:0", "cuda:1") is None


def test_a_direct_network_joins_accelerators_too():
    machine = Machine.emulated(1, hosts=2, network=Network(1e9, direct=True))
    assert machine.link("cuda:0", "cuda:1").bytes_per_second == 1e9
    assert machine.link("cpu:0", "cuda:1") is None


def test_ranks_of_one_host_have_rates_of_their_own():
    network = Network(1e9, 5e-5, on_host=Network(4e9, 1e-5))
    devices = [Device(f"cpu:{i}", rank=i, host=f"host {i // 2}") for i in range(4)]
    machine = Machine(devices, network=network)
    assert machine.copy_seconds("cpu:0", "cpu:1", 4e9) == pytest.approx(1 + 1e-5)
    assert machine.copy_seconds("cpu:1", "cpu:2", 4e9) == pytest.approx(4 + 5e-5)
    assert Machine.from_json(machine.to_json()) == machine
    assert "50 us; on one host 4 GB/s, 10 us" in str(machine)
    assert machine.slower(2).network.on_host == Network(2e9, 2e-5)
    assert "on_host" not in Machine.emulated(hosts=2).to_json()
    for wrong in (1, network):
        with pytest.raises(asc.MachineError, match="on_host of a network must be a network"):
            Network(1e9, on_host=wrong)


@pytest.mark.parametrize(
    ("ends", "way"),
    [
        (("cpu:0", "cpu:1"), "cpu:0 cpu:1"),
        (("cpu:0", "cuda:0"), "cpu:0 cuda:0"),
        (("cuda:0", "cpu:1"), "cuda:0 cpu:0 cpu:1"),
        (("cpu:0", "cuda:1"), "cpu:0 cpu:1 cuda:1"),
        (("cuda:0", "cuda:1"), "cuda:0 cpu:0 cpu:1 cuda:1"),
    ],
)
def test_a_copy_goes_by_way_of_the_cpus(ends, way):
    machine = Machine.emulated(1, hosts=2)
    stops = way.split()
    assert machine.route(*ends) == tuple(stops)
    legs = [machine.link(*leg).seconds(1e6) for leg in itertools.pairwise(stops)]
    assert machine.copy_seconds(*ends, 1e6) == pytest.approx(sum(legs))


def test_there_is_no_way_without_a_network_or_without_ranks():
    made = Machine.emulated(1, hosts=2)
    apart = Machine(made.devices, made.links)
    assert apart.route("cuda:0", "cuda:1") == ()
    assert apart.copy_seconds("cuda:0", "cuda:1", 1) == math.inf
    three = [Device("cpu"), Device("cuda:0"), Device("cuda:1")]
    hub = Machine(three, [Link("cpu", "cuda:0", 1e9), Link("cpu", "cuda:1", 1e9)])
    assert hub.route("cuda:0", "cuda:1") == ("cuda:0", "cpu", "cuda:1")
    assert hub.copy_seconds("cuda:0", "cuda:1", 1e9) == 2


def test_json_text_and_copies_keep_ranks_and_network():
    machine = Machine.emulated(1, hosts=2, network=Network(5e9, 1e-5, direct=True))
    assert Machine.from_json(machine.to_json()) == machine
    lines = str(machine).splitlines()
    assert lines[0].startswith("cpu:0 of rank 0: 50 GFLOP/s")
    assert lines[-1] == ("network between the CPUs, and accelerators, of all ranks: 5 GB/s, 10 us")
    assert machine.slower(2).network == Network(2.5e9, 2e-5, direct=True)


def test_a_machine_of_one_process_says_nothing_of_ranks():
    text = Machine.emulated(1).to_json()
    assert not re.search("rank|network|host", text)
    assert "rank" not in str(Machine.emulated(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Machine.emulated(hosts=0), "hosts must be a whole number, 1 or more, got 0"),
        (lambda: Machine.emulated(hosts=2, network="lan"), "unknown network 'lan'; known are 'eth"),
        (lambda: Device("cpu", rank=-1), "rank of device 'cpu' must be a whole number, 0 or more"),
        (lambda: Device("cpu", host=3), "host of device 'cpu' must be a name or None, got 3"),
        (lambda: Network(0), "bytes_per_second of .* must be a number above 0"),
        (lambda: Network(1, direct=1), "direct of a network must be True or False, got 1"),
        (
            lambda: Machine([Device("cpu:0", rank=0), Device("cpu:1")]),
            "device 'cpu:1' has no rank, and others have one",
        ),
        (lambda: Machine([Device("cpu")], network=3), "network must be a Network or None, got 3"),
    ],
)
def test_messages(make, message):
    with pytest.raises(asc.MachineError, match=message):
        make()


# ---- the accelerators of each rank, and how ranks exchange what is on them

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
            texts.append({**mine, **described(local)})
        machine, why = cluster._gathered(texts, None, False)
    assert why  # they share a GPU, and there may be no NCCL
    assert machine.names == ("cpu:0", "cuda:0", "cpu:1", "cuda:1")
    assert machine.physical["cuda:1"] == "cuda:0"
    assert machine.route("cuda:0", "cuda:1") == ("cuda:0", "cpu:0", "cpu:1", "cuda:1")
