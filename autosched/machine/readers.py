"""Read the parts of a machine from JSON: devices, links and networks."""

from __future__ import annotations

from typing import Any

from autosched._lib.allowed import is_device, is_whole
from autosched._lib.json_reader import number, one, struct
from autosched.machine.device import Device, Link
from autosched.machine.network import Network

__all__ = ["DEVICE", "FLAG", "LINK", "NETWORK"]

_name = one("the name of a device, such as 'cpu' or 'cuda:0'", is_device)
_name_or_null = one("the name of a device, or null", lambda item: item is None or is_device(item))
_streams = one("a whole number, 1 to 1024", lambda item: is_whole(item) and 1 <= item <= 1024)
FLAG = one("true or false", lambda item: isinstance(item, bool))
_rate = number("a number above 0", lambda n: n > 0)
_delay = number("a number, 0 or more", lambda n: n >= 0, infinite=False)
_OF_DEVICE = {
    "name": _name,
    "streams": _streams,
    "flops_per_second": _rate,
    "bytes_per_second": _rate,
    "launch_seconds": _delay,
    "nbytes": _rate,
    "physical": _name_or_null,
    "issue_seconds": _delay,
    "event_seconds": _delay,
    "rank": one(
        "a whole number, 0 or more, or null", lambda n: n is None or (is_whole(n) and n >= 0)
    ),
    "host": one("a name, or null", lambda name: name is None or isinstance(name, str)),
}


def _perhaps_rate(item: Any, place: str) -> Any:
    return None if item is None else _rate(item, place)


_OF_LINK = {
    "source": _name,
    "destination": _name,
    "bytes_per_second": _rate,
    "latency": _delay,
    "pageable_bytes_per_second": _perhaps_rate,
}


def _perhaps_network(item: Any, place: str) -> Any:
    return None if item is None else _network(item, place)


_OF_NETWORK = {
    "bytes_per_second": _rate,
    "latency": _delay,
    "direct": FLAG,
    "on_host": _perhaps_network,
}
_network = struct(Network, _OF_NETWORK, optional=_OF_NETWORK.keys() - {"bytes_per_second"})
NETWORK = _perhaps_network
DEVICE = struct(Device, _OF_DEVICE, optional=_OF_DEVICE.keys() - {"name"})
LINK = struct(Link, _OF_LINK, optional=["latency", "pageable_bytes_per_second"])
