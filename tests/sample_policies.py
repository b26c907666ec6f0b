"""Laws under every policy: Hypothesis draws which, so that one policy more makes no test longer."""

from hypothesis import settings
from hypothesis import strategies as st

from autosched.policies import POLICIES

policies = st.sampled_from(["auto", *POLICIES])
# As many examples as three policies and "auto" had when each had its own.
under_every_policy = settings(max_examples=4 * settings().max_examples)
