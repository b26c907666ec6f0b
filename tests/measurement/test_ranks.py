"""Measured networks of clusters."""

from autosched.machine.machine import Machine, Network
from autosched.measurement.ranks import _pairs
from tests.runtime.ranks import jobs
from tests.runtime.ranks.processes import Ranks


def test_all_ranks_get_one_machine_with_measured_rates_for_each_kind_of_pair():
    pool = Ranks()
    try:
        found = pool.run(jobs.measure, 3)
    finally:
        pool.close()
    assert len(set(found)) == 1
    apart, together = map(Machine.from_json, found[0])
    assert apart.network == Network(3e9, 1e-5, on_host=Network(3e9, 1e-5))
    assert together.network == Network(3e9, 1e-5)


def test_one_pair_of_each_kind_is_measured():
    hosts = Machine.emulated(gpus=0, hosts=4)
    assert _pairs(hosts) == {"far": (0, 1)}
    assert _pairs(Machine.emulated(gpus=0, hosts=1)) == {}
