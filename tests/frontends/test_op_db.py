"""Torch's own operator samples: each, captured and scheduled, equals eager bit for bit, or is refused with a reason.

All of them are slow; a sample of them is not.
"""

import pytest

from tests.frontends.op_samples import FORMS, UNDEFINED, dtype_of, examine, operators, samples

PIECES = 20
MOST = 24  # samples of one operator, evenly spaced: some have hundreds that differ in numbers alone


def wrong(ops, form, most):
    """Return what is wrong with samples of these operators, by their names."""
    found = {}
    for op in ops:
        given = [each for each in samples(op, dtype_of(op), form) if each.tensors]
        for number, sample in enumerate(given[:: max(1, -(-len(given) // most))]):
            said = examine(sample)
            if said is not None and not said.startswith("eager:") and not _is_reason(said):
                found[f"{sample.name} {number}"] = said
    return found


def _is_reason(said):
    """Whether a refusal says, beside what torch says and where, what to do instead."""
    first, *others = said.splitlines()
    return first.startswith("refused:") and ("; " in first or len(others) > 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_of_torchs_operators_is_as_eager_or_refused(form):
    assert wrong(operators()[::120], form, 2) == {}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("piece", range(PIECES))
def test_all_of_torchs_operators_are_as_eager_or_refused(piece, form):
    assert wrong(operators()[piece::PIECES], form, MOST) == {}


def test_only_operators_that_exist_are_left_out():
    operators()
    from torch.testing._internal.common_methods_invocations import op_db

    assert UNDEFINED.keys() <= {op.name for op in op_db}
