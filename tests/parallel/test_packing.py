"""Results in memory that is used again."""

import threading

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from autosched.parallel.costs import Reusing, flat


def results(reusing, keep):
    """Return the address of a first result, and that of one after it; ``keep`` part of it."""
    first = reusing([torch.ones(3), torch.ones(3)])
    address = first.data_ptr()
    kept = keep(first)
    del first
    second = reusing([torch.zeros(3), torch.full((3,), 2.0)])
    assert second.sum() == 6
    return address, second.data_ptr(), kept


USES = (
    lambda tensor: tensor,
    lambda tensor: tensor[1:],
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: memoryview(tensor.numpy()),
)


def test_torch_compile_does_not_change_what_is_used():
    """It replaces how Python calls functions, and then these hold their arguments twice."""

    def fails(graph, inputs):
        raise RuntimeError

    with pytest.raises(BackendCompilerFailed):
        torch.compile(torch.neg, backend=fails)(torch.ones(2))
    try:
        for use in (lambda tensor: None, *USES):
            first, second, kept = results(Reusing(flat), use)
            assert (first == second) == (kept is None)
            del kept
    finally:
        torch._dynamo.reset()


def test_threads_have_results_of_their_own():
    inside, go_on = threading.Event(), threading.Event()
    found = []

    def slow(tensor, out=None):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(10)
        return torch.add(tensor, 1, out=out)

    reusing = Reusing(slow)
    reusing(torch.zeros(2))
    thread = threading.Thread(target=lambda: found.append(reusing(torch.zeros(2))))
    thread.start()
    inside.wait(10)
    own = reusing(torch.full((2,), 5.0))
    go_on.set()
    thread.join()
    assert own.tolist() == [6, 6]
    assert found[0].tolist() == [1, 1]
    assert own.data_ptr() != found[0].data_ptr()
