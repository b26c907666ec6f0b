"""Sums by the library on several processes: the bits, the error, and what ends them."""

import math

import pytest
import torch

from tests.runtime.ranks import reducing_jobs as jobs

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
NUMEL = 1001


def parts(tensor: torch.Tensor) -> list[float]:
    """Return the real numbers of a tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).double().tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_the_same_bits_within_the_bound_of_every_order(ranks, size):
    found = ranks.run(jobs.add, size, DTYPES, NUMEL)
    for number, dtype in enumerate(DTYPES):
        totals = [own[number] for own in found]
        assert all(total.dtype == dtype and total.equal(totals[0]) for total in totals)
        rows = [parts(jobs.row(number, rank, NUMEL, dtype)) for rank in range(size)]
        small = (size - 1) * torch.finfo(dtype).eps / 2
        gamma = small / (1 - small)
        for total, *terms in zip(parts(totals[0]), *rows, strict=True):
            error = abs(math.fsum([*terms, -total]))
            assert error <= gamma * math.fsum(map(abs, terms))


def test_two_ranks_add_exactly_what_one_process_adds(ranks):
    for found in ranks.run(jobs.add, 2, DTYPES, NUMEL):
        for number, (dtype, total) in enumerate(zip(DTYPES, found, strict=True)):
            first, second = (jobs.row(number, rank, NUMEL, dtype) for rank in range(2))
            assert total.equal(first + second)


@pytest.mark.parametrize("seed", [0, 1])
def test_gpus_add_by_way_of_their_hosts(ranks, seed):
    assert ranks.run(jobs.add_on_gpus, 2, seed) == [True, True]
