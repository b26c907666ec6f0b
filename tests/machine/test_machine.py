"""Machines: the ready-made ones, copies, JSON there and back, and every error message."""

import copy
import dataclasses
import json
import math
import pickle
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosched.errors import MachineError
from autosched.graph.graph import Graph
from autosched.machine.machine import LINKS, Device, Link, Machine


def refused(*parts):
    return pytest.raises(MachineError, match=f"^{'.*'.join(map(re.escape, parts))}$")


# ---- ready-made machines


def test_an_emulated_machine_has_a_cpu_and_gpus_joined_by_links():
    machine = Machine.emulated(gpus=2, link="pcie4")
    assert machine.names == ("cpu", "cuda:0", "cuda:1")
    assert [(k.source, k.destination) for k in machine.links] == [
        ("cpu", "cuda:0"),
        ("cpu", "cuda:1"),
        ("cuda:0", "cuda:1"),
    ]
    assert {(k.bytes_per_second, k.latency) for k in machine.links} == {LINKS["pcie4"]}
    assert machine.imagined
    assert machine.contention


def test_nvlink_joins_gpus_and_pcie_joins_them_to_the_cpu():
    machine = Machine.emulated(gpus=2, link="nvlink4")
    assert machine.link("cuda:0", "cuda:1").bytes_per_second == LINKS["nvlink4"][0]
    assert machine.link("cpu", "cuda:1").bytes_per_second == LINKS["pcie4"][0]


def test_given_rates_replace_those_of_the_link():
    machine = Machine.emulated(
        gpus=1, bytes_per_second=1e6, latency=0.5, contention=False, cpu_streams=3
    )
    assert machine.links == (Link("cpu", "cuda:0", 1e6, 0.5, 5e5),)
    assert Machine.emulated(gpus=1, latency=0).links[0].bytes_per_second == LINKS["pcie4"][0]
    assert (machine.contention, machine.device("cpu").streams) == (False, 3)


def test_the_local_machine_has_what_torch_sees():
    machine = Machine.local(cpu_streams=2)
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert len(machine.devices) == 1 + count
    assert not machine.imagined
    assert machine.host == "cpu"
    assert machine.device("cpu").streams == 2
    assert 2**20 < machine.device("cpu").nbytes < math.inf
    auto = Machine.local(gpus=0, cpu_streams="auto")
    assert auto.device("cpu").streams == torch.get_num_threads()
    with pytest.raises(MachineError, match="'cpu' has 'all' streams; 1 to 1024 are possible"):
        Machine.local(cpu_streams="all")


def accelerators(monkeypatch, count):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_more_gpus_than_there_are_share_the_real_ones(monkeypatch):
    accelerators(monkeypatch, 2)
    machine = Machine.local(gpus=3)
    assert [(d.name, d.physical) for d in machine.devices[1:]] == [
        ("xpu:0", "xpu:0"),
        ("xpu:1", "xpu:1"),
        ("xpu:2", "xpu:0"),
    ]
    assert str(machine).splitlines()[3].endswith(f"(on xpu:0){ASSUMED}")
    assert Machine.local().names == ("cpu", "xpu:0", "xpu:1")
    assert Machine.local(gpus=0).names == ("cpu",)


def test_no_accelerator_no_gpus(monkeypatch):
    accelerators(monkeypatch, 0)
    assert Machine.local().names == ("cpu",)
    with refused(
        "this machine has no accelerator, but gpus=2; Machine.emulated(gpus=2) emulates them"
    ):
        Machine.local(gpus=2)


def test_the_memory_of_emulated_gpus_can_be_said():
    machine = Machine.emulated(gpus=2, nbytes=24e9)
    assert [device.nbytes for device in machine.devices] == [math.inf, 24e9, 24e9]
    assert Machine.emulated(gpus=1).device("cuda:0").nbytes == math.inf
    with pytest.raises(MachineError, match=r"nbytes of Device.*must be a number above 0"):
        Machine.emulated(gpus=1, nbytes=-1)


def variants(machine):
    smaller = [dataclasses.replace(device, nbytes=1e9) for device in machine.devices]
    yield copy.copy(machine)
    yield copy.deepcopy(machine)
    yield pickle.loads(pickle.dumps(machine))
    yield Machine.from_json(machine.to_json())
    yield machine.slower(2)
    yield machine.limited(1e9)
    yield dataclasses.replace(machine, contention=False)
    yield dataclasses.replace(machine, devices=smaller)
    yield dataclasses.replace(machine, devices=[Device("cpu"), Device("cuda:0")])
    yield Machine(machine.devices, machine.links)
    yield Machine(smaller, machine.links)
    yield Machine(smaller[:1])
    yield Machine([Device("cpu"), smaller[1]], machine.links)
    yield Machine(pickle.loads(pickle.dumps(smaller)), machine.links)
    yield Machine(Machine.from_json(machine.to_json()).devices, machine.links)


def test_a_copied_or_changed_machine_stays_imagined():
    for machine in variants(Machine.emulated(gpus=1)):
        assert machine.imagined
        assert all(machine.device(device.name).imagined for device in machine.devices)
        assert all(device.imagined for device in machine.devices)


def test_a_machine_that_is_said_to_be_real_is():
    emulated = Machine.emulated(gpus=1)
    for machine in (
        Machine(emulated.devices, emulated.links, imagined=False),
        dataclasses.replace(emulated, imagined=False),
        Machine([Device("cuda:0")]),
    ):
        assert not machine.imagined
        assert not any(device.imagined for device in machine.devices)
    assert Device("cuda:0") == dataclasses.replace(Device("cuda:0"), imagined=True)


def test_a_slower_machine_keeps_all_ratios():
    machine = Machine.emulated(gpus=1, contention=False)
    slow = machine.slower(4)
    assert slow.copy_seconds("cpu", "cuda:0", 10**9) == pytest.approx(
        4 * machine.copy_seconds("cpu", "cuda:0", 10**9)
    )
    for fast, device in zip(machine.devices, slow.devices, strict=True):
        assert device.flops_per_second == fast.flops_per_second / 4
        assert device.bytes_per_second == fast.bytes_per_second / 4
        assert device.launch_seconds == fast.launch_seconds * 4
        assert (device.name, device.nbytes) == (fast.name, fast.nbytes)
    assert (slow.imagined, slow.contention) == (True, False)


# ---- asking


def test_a_link_works_both_ways_and_nothing_else_does():
    machine = Machine([Device("a"), Device("b"), Device("c")], [Link("a", "b", 1e9, 1e-5)])
    assert machine.link("b", "a") is machine.link("a", "b")
    assert machine.copy_seconds("b", "a", 1e9) == machine.copy_seconds("a", "b", 1e9) == 1 + 1e-5
    assert machine.link("a", "c") is None
    assert Machine([A, B], [Link("a", "b", math.inf)]).copy_seconds("a", "b", 1e30) == 0
    assert machine.copy_seconds("a", "c", 1) == math.inf
    assert machine.copy_seconds("c", "c", 1e9) == 0


def test_the_host_is_the_first_cpu_or_the_first_device():
    assert Machine([Device("cuda:0"), Device("cpu:1"), Device("cpu:0")]).host == "cpu:1"
    assert Machine([Device("cuda:1"), Device("cuda:0")]).host == "cuda:1"


def test_a_machine_prints_a_line_per_device_and_link():
    machine = Machine(
        [Device("cpu", 2, 5e10, 1e10, 5e-6, nbytes=2**33), Device("b")],
        [Link("cpu", "b", 2.5e10, 1e-5)],
    )
    assert str(machine).splitlines() == [
        "cpu: 50 GFLOP/s, 10 GB/s, 5 us to launch, 2 compute streams, 8 GiB" + ASSUMED,
        "b: 10,000 GFLOP/s, 1,000 GB/s, 5 us to launch, 1 compute stream",
        "cpu <-> b: 25 GB/s, 10 us" + ASSUMED,
    ]
    assert repr(machine) == str(machine)


ASSUMED = " (rates are assumed, not measured)"


def test_rates_that_nobody_measured_are_marked():
    """Those of an emulated machine are what it emulates."""
    here = Machine.local(gpus=0)
    assert str(here).splitlines()[0].endswith(ASSUMED)
    measured = Machine([dataclasses.replace(here.devices[0], bytes_per_second=2e10)])
    assert "assumed" not in str(measured)
    assert "assumed" not in str(Machine.emulated(gpus=2, hosts=2))
    assert len(str(Machine.emulated(gpus=1, hosts=2)).splitlines()) == 4 + 2 + 1


# ---- JSON

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False) | st.integers(1, 10**20)
NOT_NEGATIVE = st.floats(min_value=0, allow_infinity=False) | st.integers(0, 10**20)
NAMES = st.text(min_size=1, max_size=8).filter(
    lambda s: not any(c.isspace() or c in "/@" for c in s)
) | st.just("inf")


@st.composite
def machines(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    physical = st.none() | NAMES
    streams = st.integers(1, 24)
    facts = st.tuples(streams, POSITIVE, POSITIVE, NOT_NEGATIVE, POSITIVE, physical)
    devices = [Device(name, *draw(facts)) for name in names]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = [
        Link(*draw(st.permutations(pair)), draw(POSITIVE), draw(NOT_NEGATIVE)) for pair in chosen
    ]
    return Machine(devices, links, contention=draw(st.booleans()), imagined=draw(st.booleans()))


@given(machines())
def test_json_there_and_back(machine):
    text = machine.to_json()
    assert "Infinity" not in text  # not JSON, though Python reads it
    again = Machine.from_json(text)
    assert again == machine
    assert again.to_json() == text


def test_links_and_flags_may_be_left_out_of_json():
    assert Machine.from_json('{"devices": [{"name": "cpu"}]}') == Machine([Device("cpu")])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "it must be an object, got a list"),
        ("{}", "it misses key 'devices'; its keys are 'devices', 'links', 'contention', 'imagined'"),
        ('{"devices": 3}', "devices must be a list, got 3"),
        ('{"devices": ["cpu"]}', 'devices[0] must be an object, got "cpu"'),
        ('{"devices": [{}]}', "devices[0] misses key 'name'; its keys are 'name', 'streams', "),
        ('{"devices": []}', "a machine needs at least one device"),
        (
            '{"devices": [{"name": "cpu", "streams": "inf"}]}',
            "devices[0]: device 'cpu' has 'inf' streams; 1 to 1024 are possible",
        ),
        (
            '{"devices": [{"name": "cpu"}], "links": [{"source": [], "destination": "cpu", "bytes_per_second": 1}]}',
            "links[0].source must be a string, got a list",
        ),
        ('{"devices": [{"name": "cpu", "nbytes": true}]}', 'devices[0].nbytes must be a number, or "inf", got true'),
        ('{"devices": [{"name": "cpu"}], "imagined": 1}', "imagined must be True or False, got 1"),
        ('{"devices": [{"name": "cpu", "physical": 0}]}', "devices[0].physical must be a string, got 0"),
        ('{"devices": [{"name": "cpu"}, {"name": "cpu"}]}', "device 'cpu' occurs twice"),
        (None, "not JSON: the JSON object must be str, bytes or bytearray, not NoneType"),
    ],
)  # fmt: skip
def test_what_is_no_json_of_a_machine(text, reason):
    with pytest.raises(MachineError, match=f"^{re.escape(f'not the JSON of a machine: {reason}')}"):
        Machine.from_json(text)


KEYS = st.sampled_from(["devices", "links", "name", "source", "streams"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
)


@given(JSON)
def test_any_json_gives_a_machine_or_our_error(plain):
    try:
        machine = Machine.from_json(json.dumps(plain))
    except MachineError:
        return
    assert machine.devices


# ---- errors


@pytest.mark.parametrize("field", ["flops_per_second", "bytes_per_second", "nbytes"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, "fast", None, True, 10**400])
def test_rates_that_are_not_above_zero(field, value):
    """Devices with such rates were accepted, until they came into a machine."""
    with refused(f"{field} of Device(name='cpu'", "must be a number above 0"):
        Device("cpu", **{field: value})


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "soon", True, 10**400])
def test_times_that_are_negative_or_endless(value):
    with refused("launch_seconds of Device(name='cpu'", "must be a number, 0 or more"):
        Device("cpu", launch_seconds=value)
    with refused("latency of Link(source='a'", "must be a number, 0 or more"):
        Link("a", "b", 1.0, latency=value)
    with refused("bytes_per_second of Link(source='a'", "must be a number above 0"):
        Link("a", "b", 0)


def test_devices_are_named_as_torch_names_them():
    torch = pytest.importorskip("torch")
    gpu = torch.device("cuda:0")
    assert Device(gpu) == Device(0) == Device("cuda:0")
    assert Device("cuda:1", physical=gpu) == Device("cuda:1", physical="cuda:0")
    assert Link(torch.device("cpu"), 0, 1e9) == Link("cpu", "cuda:0", 1e9)
    machine = Machine.emulated(gpus=2)
    assert machine.device(gpu) is machine.device(0) is machine.device("cuda:0")
    assert machine.link("cpu", gpu) is machine.link("cpu", "cuda:0")
    assert machine.copy_seconds("cpu", gpu, 1) == machine.copy_seconds("cpu", "cuda:0", 1)
    with refused("the machine has no device 7; it has 'cpu', 'cuda:0', 'cuda:1'"):
        machine.device(7)


STREAMS = [
    ("cpu", 0, 1024),
    ("cpu", 1025, 1024),
    ("cuda:0", 25, 24),
    ("cuda:0", 1.5, 24),
    ("cpu", True, 1024),
]
WORDS = [  # what is given, and what is said of it
    *(
        (partial(Device, name), f"a device is named as in torch, 'cpu' or 'cuda:0', got {name!r}")
        for name in ["", "a b", "a/b", "a@b", None, -1, 1.5, True]
    ),
    *(
        (partial(Device, name, number), f"device {name!r} has {number!r} streams; 1 to {most} are possible")
        for name, number, most in STREAMS
    ),
    *(
        (partial(Device, "cuda:0", physical=p), f"physical of device 'cuda:0' must be as 'cuda:0' or None, got {p!r}")
        for p in ["", "cuda 0", -1]
    ),
    *(
        (partial(Machine, [Device("cpu")], **{flag: "no"}), f"{flag} must be True or False, got 'no'")
        for flag in ("contention", "imagined")
    ),
    *(
        (partial(make, gpus=gpus), f"gpus must be a whole number, 0 or more, got {gpus!r}")
        for make in (Machine.emulated, Machine.local)
        for gpus in [-1, 1.0, True, "2"]
    ),
    *(
        (partial(Machine.emulated().slower, factor), f"a machine can be slower by a number above 0, got {factor!r}")
        for factor in [0, -2.0, math.nan, math.inf, "twice"]
    ),
    *(
        (partial(Machine.emulated().limited, nbytes), f"memory must be bytes above 0, such as 24e9, got {nbytes!r}")
        for nbytes in [0, -2.0, math.nan, "24GB", None]
    ),
]  # fmt: skip
A, B, C = map(Device, "abc")
TWICE = "devices 'a' and 'b' have two links; one works both ways"
LINK_NAMES = "'pcie3', 'pcie4', 'pcie5', 'nvlink3', 'nvlink4'"
HAS = "it has 'cpu', 'cuda:0', 'cuda:1'"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *WORDS,
        (lambda: Machine([A, "cuda:0"]), "a machine's devices must be Device, got 'cuda:0'"),
        (lambda: Machine([A, B], [("a", "b")]), "a machine's links must be Link, got ('a', 'b')"),
        (lambda: Machine(A), f"devices of a machine must be a list, got {A!r}"),
        (lambda: Machine([A], None), "links of a machine must be a list, got None"),
        (
            lambda: Machine([A, B], [Link("a", "c", 1.0)]),
            "the machine has no device 'c'; it has 'a', 'b'",
        ),
        (lambda: Machine([A], [Link("a", "a", 1.0)]), "a link joins two devices, got 'a' twice"),
        (lambda: Machine([A, B, C], [Link("a", "b", 1.0), Link("a", "b", 2.0)]), TWICE),
        (lambda: Machine([A, B, C], [Link("a", "b", 1.0), Link("b", "a", 1.0)]), TWICE),
        (lambda: Machine.emulated(link="pcie9"), f"unknown link 'pcie9'; known are {LINK_NAMES}"),
        (
            lambda: Machine.emulated(link=["pcie4"]),
            f"unknown link ['pcie4']; known are {LINK_NAMES}",
        ),
        (lambda: Machine.emulated().device("cuda:2"), f"the machine has no device 'cuda:2'; {HAS}"),
        (lambda: Machine.emulated().device(["cpu"]), f"the machine has no device ['cpu']; {HAS}"),
    ],
)
def test_machines_devices_and_links_that_cannot_be(make, message):
    with refused(message):
        make()


def test_an_index_is_that_of_an_accelerator_of_the_type_that_is_there(monkeypatch):
    assert Device(1).name == "cuda:1"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert Device(1).name == "xpu:1"
    graph = Graph()
    with graph.on(1):
        graph.output(y=graph.input("x") + 1)
    assert graph.task("add").device == "xpu:1"
