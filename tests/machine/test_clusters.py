"""Machines of several ranks: names, networks, ways between devices, JSON and messages."""

import itertools
import math
import re

import pytest

import autosched as asc
from autosched.machine.device import NETWORKS, Network
from autosched.machine.machine import Device, Link, Machine


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
    assert hub.route("cuda:0", "cuda:1") == ()


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
