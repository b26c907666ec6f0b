"""Captures know how tensors lie in memory: the strides of real kernels, not those that torch predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched._lib.fake_tensors import Fakes

NORM, LINEAR = nn.BatchNorm1d(8), nn.Linear(8, 8)


def normed(x: Tensor) -> Tensor:  # over the last dimension, as PatchTST and Conformers have it
    return NORM(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def strided(x: Tensor) -> Tensor:  # Longformer's way of making windows
    y = normed(x)
    return y.as_strided(y.size(), y.stride())


def pooled(x: Tensor) -> Tensor:  # Swin's pooler
    return functional.adaptive_avg_pool1d(LINEAR(x).transpose(1, 2), 1).flatten(1)


def pooled_in_channels_last(x: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(x[:, None].permute(0, 3, 1, 2), 1).flatten(1)


def rounded(x: Tensor) -> Tensor:
    y = torch.div(x.mT, 0.3 + x.mT[:1], rounding_mode="floor")
    return y.flatten() if y.is_contiguous() else y.contiguous() * 2


def attended(x: Tensor) -> Tensor:
    q = LINEAR(x).unflatten(-1, (2, 4)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def padded(x: Tensor) -> Tensor:
    y = functional.pad(x.mT, (1, 1), mode="reflect")
    return y.as_strided(y.shape, y.stride())


def stepped(x: Tensor) -> Tensor:
    loss = LINEAR(normed(x)).square().mean()
    found = torch.autograd.grad(loss, [*NORM.parameters(), *LINEAR.parameters()])
    return torch.cat([loss[None], *map(torch.flatten, found)])


FUNCTIONS = [
    lambda x: LINEAR(normed(x)),
    strided,
    pooled,
    pooled_in_channels_last,
    rounded,
    attended,
    padded,
    stepped,
    lambda x: torch.copysign(x.mT, x.mT[:1]).stride(0) * x,
    lambda x: functional.conv1d(x.mT, torch.ones(8, 8, 3)).as_strided((4, 8), (24, 3)),
    lambda x: functional.conv2d(
        x[:, None].to(memory_format=torch.channels_last), torch.ones(2, 1, 2, 2)
    ).flatten(),
    lambda x: functional.instance_norm(x.mT).flatten(1),
    lambda x: functional.group_norm(x.mT, 4).flatten(1),
    lambda x: functional.interpolate(x[:, None].transpose(2, 3), scale_factor=2).flatten(1),
    lambda x: functional.max_pool2d(x[:, None].permute(0, 3, 2, 1), 1, return_indices=True)[
        1
    ].flatten(1),
]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_what_asks_for_strides_does_as_it_does_eagerly(fn: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    NORM.reset_running_stats()
    eager = fn(x)
    NORM.reset_running_stats()
    with asc.compile(
        fn, asc.Machine.emulated(gpus=1), policy="single", backend="host", check=True
    ) as run:
        ours = run(x)
    assert torch.equal(ours, eager)
    assert ours.stride() == eager.stride()


def test_kernels_run_once_for_arguments_of_a_kind_and_draw_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    real = torch.full
    monkeypatch.setattr(
        torch, "full", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs)
    )
    before = torch.get_rng_state()
    graph = asc.capture(
        lambda x: [functional.dropout(x.mT, 0.5) for _ in range(3)], torch.ones(2, 3, 7, 5, 11)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) <= 3
    assert len(graph.tasks) > 3


def test_kernels_of_the_users_own_operators_do_not_run() -> None:
    ran = []

    @torch.library.custom_op("test_fakes::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        ran.append(x)
        return x.clone()

    noted.register_fake(torch.empty_like)
    asc.capture(lambda x: torch.ops.test_fakes.noted(x.mT), torch.ones(2, 3))
    assert not ran


def test_an_operator_whose_fake_kernel_is_wrong_about_strides_is_refused_where_they_count() -> None:
    @torch.library.custom_op("test_fakes::wrong", mutates_args=())
    def wrong(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    wrong.register_fake(lambda x: torch.empty(x.shape))

    def fn(x: Tensor) -> Tensor:
        y = torch.ops.test_fakes.wrong(x)
        return y.as_strided((3, 2), (2, 1)) + 0  # type: ignore[no-any-return]

    run = asc.compile(fn, asc.Machine.emulated(gpus=1), backend="host")
    with pytest.raises(
        asc.TaskError, match=r"its argument has strides \(1, 2\), but had \(3, 1\) when"
    ):
        run(torch.ones(2, 3))


def test_a_question_about_numbers_is_not_answered_from_zeros() -> None:
    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return x + 1 if torch._nested_tensor_from_mask_left_aligned(x, mask) else x  # type: ignore[attr-defined]

    with pytest.raises(asc.CaptureError, match="reads the padding mask"):
        asc.capture(fn, torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool))


def test_what_is_known_of_kernels_is_used_without_running_them() -> None:
    x, y = torch.ones(6, 4).t(), torch.ones(1, 4).t()
    with Fakes(learn=False) as fakes:
        guessed = torch.div(fakes.from_tensor(x), fakes.from_tensor(y), rounding_mode="floor")
    with Fakes() as fakes:
        known = torch.div(fakes.from_tensor(x), fakes.from_tensor(y), rounding_mode="floor")
    with Fakes(learn=False) as fakes:
        then = torch.div(fakes.from_tensor(x), fakes.from_tensor(y), rounding_mode="floor")
    real = torch.div(x, y, rounding_mode="floor")
    assert guessed.stride() != known.stride() == then.stride() == real.stride()


def slices() -> Tensor:
    return torch.arange(40.0)


@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_as_strided_from_the_beginning_of_memory_is_equal_to_eager_or_refused(place: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.as_strided((2,), (1,), x.storage_offset()) + 0

    with asc.compile(fn, asc.Machine.emulated(gpus=1), place={"*": place}) as run:
        assert torch.equal(run(slices()[:10]), fn(slices()[:10]))
        with pytest.raises(asc.AutoschedError, match="begins at element 18"):
            run(slices()[18:28])


def test_as_strided_from_the_beginning_of_a_tensor_takes_any_slice() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.as_strided((2, 2), (2, 1)) + 0

    with asc.compile(fn, asc.Machine.emulated(gpus=1), place={"*": "cuda:0"}) as run:
        for x in (slices()[8:18], slices()[18:28], slices()[:10], slices()[::4]):
            assert torch.equal(run(x), fn(x))
        assert run.cache_info().misses == 2
