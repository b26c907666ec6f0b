"""Schedules over several processes: equal to the serial run, bit for bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.testing.strategies import graphs
from tests.runtime.ranks import jobs
from tests.sample_policies import policies

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("size", [2, 3, 4])
@given(data=st.data(), policy=policies, streams=st.integers(1, 2))
def test_runs_equal_the_serial_run(ranks, size, data, policy, streams):
    devices = tuple(f"cpu:{rank}" for rank in range(size))
    graph = data.draw(graphs(devices))
    outputs = data.draw(st.none() | st.sampled_from(devices))
    found = ranks.run(jobs.run_drawn, size, graph, policy, streams, outputs, 3)
    refused = [wrong[:1] for wrong in found if wrong and wrong[0].startswith("refused")]
    assert len(refused) in (0, size)
    assert refused or found == [[]] * size
