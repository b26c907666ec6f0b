"""Laws under every policy: Hypothesis draws which, so that one policy more makes no test longer."""

from hypothesis import settings
from hypothesis import strategies as st

from autosched.policies import POLICIES

policies = st.sampled_from(["auto", *POLICIES])
# Twice as many examples as of other laws: some of each policy.
under_every_policy = settings(max_examples=2 * settings().max_examples)
