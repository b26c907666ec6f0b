"""Autocast on simulated GPUs casts what torch's own lists of tests for CUDA say."""

from __future__ import annotations

import sys
import threading
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autosched.sanitizer import sanitize
from autosched.simulated_gpus import playing

HALF, FLOAT = torch.float16, torch.float32
# Two are only in builds for CUDA, one returns no tensor, and one has its equation elsewhere.
SKIPPED = {"cudnn_convolution", "cudnn_convolution_transpose", "equal", "einsum"}
if torch.__version__ < "2.12":  # torch has no shapes of it without numbers
    SKIPPED.add("_convolution")


def torchs_lists() -> Any:
    """Return operators, arguments on a simulated GPU, and types, by torch's own tests."""
    stub = SimpleNamespace(TestCase=unittest.TestCase, assert_expected_inline=None)
    with mock.patch.dict(sys.modules, {"expecttest": stub}):
        from torch.testing._internal.autocast_test_lists import AutocastTestLists
    return AutocastTestLists("cuda")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of deprecated operators
@pytest.mark.parametrize(
    ("group", "owner", "dtype"),
    [
        ("torch_fp16", torch, HALF),
        ("torch_fp32", torch, FLOAT),
        ("torch_need_autocast_promote", torch, FLOAT),
        ("torch_expect_builtin_promote", torch, None),
        ("nn_fp16", torch._C._nn, HALF),
        ("nn_fp32", torch._C._nn, FLOAT),
        ("linalg_fp16", torch._C._linalg, HALF),
        ("methods_fp16", torch.Tensor, HALF),
        ("methods_fp32", torch.Tensor, FLOAT),
    ],
)
def test_operators_have_the_types_of_torchs_lists(group: str, owner: Any, dtype: Any) -> None:
    wrong = {}
    with playing(1, numbers=False):
        for name, args, *rest in getattr(torchs_lists(), group):
            if name in SKIPPED:
                continue
            kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
            with torch.autocast("cuda"):
                results = tree_leaves(getattr(owner, name)(*args, **kwargs))
            assert {item.device.type for item in results} == {"cuda"}, name
            types = {item.dtype for item in results}
            if types != {dtype or rest[0]}:
                wrong[name] = types
    assert not wrong


def test_what_autocast_forbids_is_forbidden() -> None:
    with playing(1, numbers=False):
        for name, args, owner in torchs_lists().banned:
            with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
                getattr(owner, name)(*args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_gradients_and_regions(dtype: torch.dtype) -> None:
    with playing(1) as gpus:
        gpus.eagerness = 2.0
        x, w = torch.rand(4, 4), torch.rand(4, 4)
        xs, ws = x.cuda(), w.cuda().requires_grad_()
        with torch.autocast("cuda", dtype):
            y = torch.mm(xs, ws)
            with torch.autocast("cuda", enabled=False):
                assert torch.mm(xs, xs).dtype == FLOAT
            assert torch.einsum("ij,jk->ik", xs, ws).dtype == dtype
            found: list[torch.dtype] = []
            thread = threading.Thread(target=lambda: found.append(torch.mm(xs, xs).dtype))
            thread.start()
            thread.join()
            assert found == [FLOAT]  # regions are of threads
        y.sum().backward()
        torch.testing.assert_close(y.cpu(), torch.mm(x.to(dtype), w.to(dtype)))
        assert ws.grad is not None
        assert ws.grad.dtype == FLOAT
        torch.testing.assert_close(
            ws.grad.cpu(), torch.mm(x.to(dtype).t(), torch.ones(4, 4, dtype=dtype)).float()
        )
        assert torch.mm(xs, ws).dtype == FLOAT
    assert not torch.is_autocast_enabled("cuda")


def test_memory_goes_back_after_a_region() -> None:
    with playing(1, numbers=False) as gpus:
        net = nn.Linear(4, 4).cuda()
        before = gpus.allocated[0]
        for _ in range(2):
            with torch.autocast("cuda"):
                net(torch.ones(2, 4, device="cuda")).sum().backward()
            net.zero_grad()
        assert gpus.allocated[0] == before


@pytest.mark.parametrize("waits", [False, True])
def test_a_weight_is_cast_once_on_the_stream_of_its_first_use(waits: bool) -> None:
    """So another stream that uses the cast must wait for it."""

    def program() -> torch.Tensor:
        net, x, side = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda"), torch.cuda.Stream()
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.autocast("cuda"):
            with torch.cuda.stream(side):
                y = net(x)
            if waits:
                main.wait_stream(side)
            z = net(x)
            main.wait_stream(side)
        return y + z

    kinds = {finding.kind for finding in sanitize(program).findings}
    assert ("race" in kinds) is not waits
    assert bool(kinds) is not waits


@pytest.mark.parametrize("numbers", [False, True])
def test_training_with_a_scaler(numbers: bool) -> None:
    def program() -> tuple[float, bool]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)
        x, before = torch.ones(2, 4, device="cuda"), net[0].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = nn.functional.mse_loss(net(x), x * 2)
            assert loss.dtype == FLOAT
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale(), torch.equal(before, net[0].weight)

    report = sanitize(program, numbers=numbers)
    assert not report.findings, str(report)
    if numbers:
        assert report.result == (2.0**9, False)
