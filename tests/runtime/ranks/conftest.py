"""A pool of processes for all tests of ranks, and processes for a test that ends some of them."""

import pytest

from tests.runtime.ranks.processes import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Processes that do jobs, and stay."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def mortals():
    """Processes of this test alone."""
    pool = Ranks()
    yield pool
    pool.close()
