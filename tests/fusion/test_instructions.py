"""What Inductor finds out of the compiler is found out once, while something else is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

import autosched as asc
from autosched.frontends import compiled
from autosched.fusion import instructions
from autosched.fusion.fusing import begin_probes_for
from autosched.fusion.instructions import begin_probes
from tests.fusion.regions import needs_compiler


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Let no thread be started yet; yield those that are, and wait for them."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(instructions, "_begun", threads)
    yield threads
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_inductor_waits_for_a_test_that_has_begun(begun: list[threading.Thread]) -> None:
    finish = threading.Event()
    calls: list[str] = []

    def find() -> list[str]:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            finish.wait(5)
        return ["avx"]

    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", find):
        for _ in range(2):
            begin_probes()
        assert len(begun) == 1
        found: list[list[str]] = []
        waiting = threading.Thread(target=lambda: found.append(cpu_vec_isa.valid_vec_isa_list()))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert not found
        finish.set()
        waiting.join(60)
        begun[0].join(60)
        assert found == [["avx"]]
        assert calls == ["autosched-isa", waiting.name]
        assert cpu_vec_isa.valid_vec_isa_list is find


def test_an_error_is_raised_where_the_result_is_needed(begun: list[threading.Thread]) -> None:
    def fails() -> None:
        raise ArithmeticError

    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", fails):
        begin_probes()
        with pytest.raises(ArithmeticError):
            cpu_vec_isa.valid_vec_isa_list()


def test_the_settings_of_inductor_are_those_of_the_caller(begun: list[threading.Thread]) -> None:
    seen: list[object] = []

    def find() -> None:
        seen.append(config.cpp.simdlen)

    with (
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", find),
        config.patch({"cpp.simdlen": 256}),
    ):
        begin_probes()
        begun[0].join(60)
    assert seen == [256]


def test_without_a_thread_inductor_finds_out_by_itself(
    begun: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            begin_probes()
        assert cpu_vec_isa.valid_vec_isa_list is list
    begun.clear()


def test_nothing_begins_for_machines_that_are_imagined(begun: list[threading.Thread]) -> None:
    begin_probes_for(asc.Machine.emulated(gpus=1))
    assert not begun
    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list):
        begin_probes_for(asc.Machine.local(gpus=0))
        begun[0].join(60)
    assert len(begun) == 1


@needs_compiler
def test_a_compiled_function_begins_before_its_capture(
    begun: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    captured = compiled.captured

    def noted(*args: Any) -> Any:
        seen.append(len(begun))
        return captured(*args)

    monkeypatch.setattr(compiled, "captured", noted)
    monkeypatch.setattr(compiled, "fused", lambda graph, **_: graph)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    for fuse in (False, True):
        asc.compile(torch.relu, asc.Machine.local(gpus=0), fuse=fuse)(torch.ones(2))
    assert seen == [0, 1]
