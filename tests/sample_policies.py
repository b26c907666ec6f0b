"""Laws under every policy: Hypothesis draws which, so that one policy more makes no test longer.

And a policy that puts tasks where a test says.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES, least_memory, search
from autosched.policies.local_search.splitting import split


# Functions of this module, so that other processes get them, too.
def searched(problem: asc.Problem) -> asc.Placement:
    return search(moves=20)(problem)


def divided(problem: asc.Problem) -> asc.Placement:
    return split()(problem)


policies = st.sampled_from(["auto", *POLICIES, least_memory, searched, divided])
# As many examples as three policies and "auto" had when each had its own.
under_every_policy = settings(max_examples=4 * settings().max_examples)


def placed(on: str = "cpu", **device: str) -> Callable[..., asc.Placement]:
    """Return the policy that puts tasks where the keywords say, and all others on one device."""

    def policy(problem: asc.Problem) -> asc.Placement:
        names = tuple(task.name for task in problem.graph.tasks)
        return asc.Placement({name: device.get(name, on) for name in names}, names)

    return policy
