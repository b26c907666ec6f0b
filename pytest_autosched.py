"""The fixture ``sanitized_cuda`` for pytest.

A module of its own, so that pytest imports neither torch nor autosched before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def sanitized_cuda(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Simulate a GPU, and fail the test if its stream code has findings.

    ``@pytest.mark.parametrize("sanitized_cuda", [{"gpus": 2, "numbers": True}], indirect=True)``
    gives the arguments of ``asc.testing.simulated_gpus``. The fixture has ``report``.
    """
    from autosched.sanitizer import watching

    with watching(**getattr(request, "param", {})) as watched:
        yield watched


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Fail a test that has findings."""
    result = yield
    watched = getattr(item, "funcargs", {}).get("sanitized_cuda")
    if watched is not None and watched.report.findings:
        pytest.fail(str(watched.report), pytrace=False)
    return result
