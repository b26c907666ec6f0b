"""The stream semantics of backward passes, as torch's notes on CUDA have them, and more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.sanitizer import sanitize


def kinds(program: Callable[[], Any], **options: Any) -> set[str]:
    return {finding.kind for finding in sanitize(program, **options).findings}


def leaf() -> torch.Tensor:
    return torch.ones(4, device="cuda", requires_grad=True)


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def backward_on_the_same_stream() -> torch.Tensor:
    x, side = leaf(), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        loss = (x * 2).sum()
        loss.backward()
        used = x.grad + 1
    main().wait_stream(side)
    x.grad.record_stream(main())
    used.record_stream(main())
    return used


def gradients_are_used_outside(waits: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        x, side = leaf(), torch.cuda.Stream()
        side.wait_stream(main())
        with torch.cuda.stream(side):
            (x * 2).sum().backward()
        if waits:
            main().wait_stream(side)
        return x.grad + 1

    return program


def forward_on_a_side_stream(joins: bool) -> Callable[[], torch.Tensor]:
    """Backward of a branch runs on the stream of the branch, and is joined by the engine."""

    def program() -> torch.Tensor:
        x, side = leaf(), torch.cuda.Stream()
        side.wait_stream(main())
        with torch.cuda.stream(side):
            y = (x * 2).exp()
        if joins:
            main().wait_stream(side)
        loss = y.sum() + (x * 3).sum()
        loss.backward()
        return x.grad + 1

    return program


def initial_gradient_elsewhere(waits: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        x, side = leaf(), torch.cuda.Stream()
        loss = (x * 2).exp()
        with torch.cuda.stream(side):
            gradient = torch.full_like(loss, 2.0)
        if waits:
            main().wait_stream(side)
        loss.backward(gradient)
        gradient.record_stream(main())
        return x.grad + 1

    return program


def gradients_that_are_asked_for(waits: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        x, side = leaf(), torch.cuda.Stream()
        side.wait_stream(main())
        with torch.cuda.stream(side):
            y = x * 2
            z = y.exp()
            (found,) = torch.autograd.grad(z.sum(), [y])
        if waits:
            main().wait_stream(side)
        return found + 1

    return program


def two_branches_on_two_streams() -> torch.Tensor:
    x, streams = leaf(), [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for stream in streams:
        stream.wait_stream(main())
        with torch.cuda.stream(stream):
            outputs.append((x * 2).sin())
        main().wait_stream(stream)
    (outputs[0] + outputs[1]).sum().backward()
    return x.grad * 2


def a_hook_sends_gradients_to_another_stream(waits: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        model, side = nn.Linear(4, 4, device="cuda"), torch.cuda.Stream()

        def reduce(parameter: torch.Tensor) -> None:
            side.wait_stream(main())
            with torch.cuda.stream(side):
                parameter.grad.mul_(0.5)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        if waits:
            main().wait_stream(side)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
        main().wait_stream(side)
        return model.weight.detach()

    return program


def a_graph_across_gpus() -> torch.Tensor:
    first, second = nn.Linear(4, 4, device="cuda:0"), nn.Linear(4, 4, device="cuda:1")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        second(first(torch.ones(2, 4, device="cuda:0")).to("cuda:1")).sum().backward()
        optimizer.step()
    return first.weight.detach()


def a_checkpoint_within(reentrant: bool) -> Callable[[], torch.Tensor]:
    def program() -> torch.Tensor:
        model, side = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), torch.cuda.Stream()
        x = leaf()
        side.wait_stream(main())
        with torch.cuda.stream(side):
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        main().wait_stream(side)
        y.sum().backward()
        return model[0].weight.grad + 1

    return program


@pytest.mark.parametrize(
    "program",
    [
        backward_on_the_same_stream,
        gradients_are_used_outside(True),
        forward_on_a_side_stream(True),
        initial_gradient_elsewhere(True),
        gradients_that_are_asked_for(True),
        two_branches_on_two_streams,
        a_hook_sends_gradients_to_another_stream(True),
        a_graph_across_gpus,
        a_checkpoint_within(False),
        a_checkpoint_within(True),
    ],
)
def test_right_programs_are_silent(program: Callable[[], torch.Tensor]) -> None:
    report = sanitize(program, gpus=2)
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (gradients_are_used_outside(False), "autograd"),
        (forward_on_a_side_stream(False), "race"),
        (initial_gradient_elsewhere(False), "autograd"),
        (gradients_that_are_asked_for(False), "autograd"),
        (a_hook_sends_gradients_to_another_stream(False), "autograd"),
    ],
)
def test_wrong_programs_are_not(program: Callable[[], torch.Tensor], kind: str) -> None:
    assert kind in kinds(program)


def test_backward_computes_what_it_computes_without_streams() -> None:
    def program() -> list[float]:
        return forward_on_a_side_stream(True)().tolist()

    expected = (1 + 3 + 2 * torch.full((4,), 2.0).exp()).tolist()
    assert sanitize(program, numbers=True).result == pytest.approx(expected)
