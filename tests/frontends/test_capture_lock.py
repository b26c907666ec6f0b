"""Captures take turns, and leave what all threads share as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.frontends.capture_lock import is_capturing
from tests.models import mlp

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.ones(3, 8)


def together(*jobs: Any) -> list[BaseException]:
    """Run functions in threads at once; return what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(job: Any) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_what_other_threads_draw_meanwhile_is_theirs() -> None:
    """A capture set a seed of its own, and then the state from before: others had its numbers, and had theirs again."""
    inside, drawn = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        inside.set()
        assert drawn.wait(30)
        return x + torch.rand(3)

    def draws() -> None:
        assert inside.wait(30)
        nn.Linear(2, 2)(torch.ones(2))  # hooks of all modules are there
        torch.manual_seed(7)
        found.append(torch.rand(2))
        drawn.set()

    assert together(lambda: asc.capture(step, torch.ones(3)), draws) == []
    found.append(torch.rand(2))
    torch.manual_seed(7)
    assert torch.equal(torch.cat(found), torch.rand(4))


def of_all_threads() -> list[Any]:
    """Return what a capture replaces in Python and torch, for as long as it lasts."""
    return [
        print,
        torch.random.default_generator,
        torch._subclasses.FakeTensor,
        torch.overrides.has_torch_function,
        torch.autograd._engine_run_backward,
        torch.autograd.graph._engine_run_backward,
        [*torch.fx.proxy._COPY_META_FIELDS],
        torch.Generator in torch.fx.proxy._create_arg_bypass,
        nn.Module.__call__,
        nn.TransformerEncoder.forward,
    ]


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_or_interrupt_leaves_all_as_it_was(
    error: type[BaseException], older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:  # a version of torch without this
        monkeypatch.delattr(torch.compiler, "_patch_engine_backward", raising=False)
    model = mlp()
    model(vectors := torch.ones(2, next(model.parameters()).shape[1])).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    shared = of_all_threads()

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        raise error

    state = torch.get_rng_state()
    with pytest.raises(asc.CaptureError if error is ValueError else error):
        asc.capture(step, vectors)
    assert of_all_threads() == shared
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True)
    )
    assert not is_capturing()
    asc.capture(model, vectors)


def test_a_compiled_function_in_a_captured_one_is_refused() -> None:
    with (
        asc.compile(torch.sin, MACHINE, backend="host") as inner,
        asc.compile(lambda x: inner(x) * 2, MACHINE) as outer,
    ):
        for call in (outer, lambda x: asc.capture(lambda y: asc.capture(torch.sin, y), x)):
            with pytest.raises(
                asc.CaptureError,
                match="is called in a function that is being captured; call the function itself",
            ):
                call(X)
        assert torch.equal(inner(X), X.sin())
