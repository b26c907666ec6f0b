"""Measured networks of clusters."""

import pytest

from autosched.machine.machine import Machine, Network
from autosched.measurement.ranks import _pairs
from tests.runtime.ranks import jobs
from tests.runtime.ranks.processes import Ranks

DEFAULT = Network(6e9, latency=25e-6)


@pytest.mark.xdist_group("ranks")
def test_all_ranks_get_one_machine_with_measured_rates_for_each_kind_of_pair():
    pool = Ranks()
    try:
        found = pool.run(jobs.measure, 3)
    finally:
        pool.close()
    assert len(set(found)) == 1
    apart, together = map(Machine.from_json, found[0])
    assert {apart.network.on_host, together.network.on_host} > {None}
    rates = [apart.network, apart.network.on_host, together.network]
    assert all(1e6 < rate.bytes_per_second < 1e14 for rate in rates)
    assert not {rate.bytes_per_second for rate in rates} & {DEFAULT.bytes_per_second}
    near, far = apart.link("cpu:0", "cpu:1"), apart.link("cpu:0", "cpu:2")
    assert near.bytes_per_second == apart.network.on_host.bytes_per_second
    assert far.bytes_per_second == apart.network.bytes_per_second


def test_one_pair_of_each_kind_is_measured():
    hosts = Machine.emulated(gpus=0, hosts=4)
    assert _pairs(hosts) == {"far": (0, 1)}
    assert _pairs(Machine.emulated(gpus=0, hosts=1)) == {}
