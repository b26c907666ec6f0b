"""Sums by the library on several processes: the bits, the error, and what ends them."""

import math
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import autosched as asc
from autosched.runtime.ranks import reducing
from autosched.runtime.ranks.reducing import AllReduce
from tests.runtime.ranks import reducing_jobs as jobs
from tests.runtime.ranks.processes import until

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


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_raises_is_named_on_all_others_and_sums_go_on(ranks, victim):
    found = ranks.run(jobs.fail, 3, "raise", victim, 1 << 18)
    for ended in found:
        assert ended[0] == ended[2] == found[0][0]
        assert f"task 'b0.finish.cpu:{victim}' on cpu:{victim}" in ended[1]
        assert "ValueError: of a test" in ended[1]
    assert all("waited: b0" in found[rank][1] for rank in range(3) if rank != victim)


def test_a_rank_that_is_killed_is_named_on_all_others(mortals):
    """Also when a part of a row is on its way, for which gloo waits for ever."""
    victim = mortals.start(jobs.fail, 3, "stop", 1, 1 << 24)[1]
    until(lambda: is_stopped(victim.pid))
    os.kill(victim.pid, signal.SIGKILL)
    found = mortals.results(3)
    assert found[1] == (-signal.SIGKILL, "dead")
    for rank in (0, 2):
        told = found[rank][0][1]
        assert told.startswith("RankError: rank 1 has gone: its process was ended")
        assert f"rank {rank} waited: b0" in told


class Stuck:
    """A session whose wire is lost, and starts what gloo never ends."""

    rank = 0
    is_lost = False

    def __init__(self):
        self.users = []
        self.tell_when_lost = self.users.append

    def wire_of_run(self, _):
        return self

    def all_reduce(self, _):
        return self

    def get_future(self):
        return torch.futures.Future()

    def cause(self, pending):
        return asc.RankError(f"lost; waited: {pending}")


def test_a_sum_that_gloo_never_ends_is_given_up_when_the_wire_is_lost(monkeypatch):
    session = Stuck()
    monkeypatch.setattr(reducing, "session", lambda: session)
    row, mark = torch.ones(3), torch.zeros(1)
    call = AllReduce("b0")
    call.start(row)
    (under_way,) = session.users
    told = []

    def finish():
        with pytest.raises(asc.RankError) as found:
            call.finish(row, [mark])
        told.append(str(found.value))

    waiting = threading.Thread(target=finish, daemon=True)
    waiting.start()
    session.is_lost = True
    under_way.lost()
    waiting.join(10)
    assert told == ["lost; waited: b0"]


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by a signal."""
    stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[0] == "T"
