"""Backends: what each makes of streams, copies, frees and threads; on accelerators, see test_on_gpu."""

from __future__ import annotations

import inspect
import itertools
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import autosched as asc
from autosched.program.program import Copy, Program, Stream
from autosched.program.units import waiting_for_host
from autosched.runtime.backends import (
    BACKENDS,
    Backend,
    Entered,
    Freeing,
    HandsOut,
    Located,
    Threaded,
    Timed,
    accelerator,
    make,
)
from autosched.runtime.backends.emulated import Emulated
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.threads import Threads
from autosched.runtime.backends.virtual import Virtual

CPU = asc.Machine([asc.Device("cpu")])
CPUS = asc.Machine([asc.Device("cpu", streams=2)])
TWO_GPUS = asc.Machine.emulated(gpus=2)
CPU_TO_GPU = Copy(Stream("cuda:0", "copy-in"), "x", 0, "cpu", "cuda:0")


def fork(fn=lambda: torch.get_num_threads(), count=2):
    graph = asc.Graph("fork")
    graph.output(*(graph.add(fn, name=f"t{i}") for i in range(count)))
    return graph


def chain(*fns):
    graph = asc.Graph("chain")
    value = graph.input("x")
    for fn in fns:
        value = graph.add(fn, value)
    graph.output(y=value)
    return graph


# ---- the table

CAPABILITIES = (Entered, Freeing, HandsOut, Located, Threaded, Timed)


def methods_of(kind):
    return inspect.getmembers(kind, inspect.isfunction)


class Minimal:
    """A backend with the methods that each must have, and no other."""

    def open(self, program, machine):
        self.log = []

    def launch(self, streams, seconds, call):
        return call

    def transfer(self, copy):
        self.log.append(str(copy))
        return lambda source, into: source.clone() if into is None else into.copy_(source)

    def record(self, stream, event):
        return None

    def wait(self, stream, event):
        return None

    def begin(self, stopped):
        self.log.append("begin")

    def join(self):
        self.log.append("join")

    def close(self):
        self.log.append("close")


def test_a_backend_needs_eight_methods():
    assert len([name for name in vars(Minimal) if not name.startswith("_")]) == 8
    backend = Minimal()
    assert not any(isinstance(backend, kind) for kind in CAPABILITIES)
    graph = chain(torch.neg, torch.abs)
    policy = lambda *_: asc.Placement({"neg": "cuda:0", "abs": "cuda:1"}, ("neg", "abs"))  # noqa: E731
    with asc.schedule(graph, TWO_GPUS, policy=policy, backend=backend) as schedule:
        for timeout in (None, None, 60.0):
            assert schedule(x=torch.ones(2), timeout=timeout)["y"].tolist() == [1, 1]
        with pytest.raises(asc.ScheduleError, match="cannot be profiled: it measures no times"):
            schedule.profile(x=torch.ones(2))
    assert backend.log[-1] == "close"
    assert backend.log.count("begin") == backend.log.count("join") == 3


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_the_methods_of_the_protocol_with_the_same_arguments(name):
    backend = make(name)
    has = [kind for kind in CAPABILITIES if isinstance(backend, kind)]
    for method, function in itertools.chain(*map(methods_of, [Backend, *has])):
        if not method.startswith("_"):
            expected = list(inspect.signature(function).parameters)[1:]
            assert list(inspect.signature(getattr(backend, method)).parameters) == expected, method


def test_an_unknown_backend_is_refused():
    with pytest.raises(
        asc.ScheduleError, match="unknown backend 'gpu'; known are 'host', 'threads', 'emulated'"
    ):
        make("gpu")


# ---- host


@pytest.mark.parametrize("backend", [Host(), Emulated(), Virtual(), Threads()])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.bool]
)
@pytest.mark.parametrize(
    "cut", [lambda t: t[1], lambda t: t[1:], lambda t: t[1:, 1::2], lambda t: t[2:].t()]
)
def test_a_copy_has_the_alignment_of_its_source(backend, dtype, cut):
    """A matrix kernel of MKL gave other last bits for a mini-batch ``data[1:9]`` of rows of 13 numbers."""
    leaf = cut(torch.arange(4 * 13).reshape(4, 13).to(dtype))
    copied = backend.transfer(CPU_TO_GPU)(leaf, None)
    assert copied.data_ptr() % 64 == leaf.data_ptr() % 64 != 0
    assert (copied.stride(), copied.storage_offset(), copied.dtype) == (leaf.stride(), 0, dtype)
    assert torch.equal(copied, leaf)
    leaf.zero_()
    assert copied.any()


# ---- threads


def test_threads_run_no_gpu():
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=x + 1, z=x - 1)
    with (
        asc.schedule(graph, TWO_GPUS, policy="round_robin", backend="threads") as schedule,
        pytest.raises(
            asc.MachineError,
            match="the threads backend runs CPU streams, and 'cuda:0' is no CPU; backend='emu",
        ),
    ):
        schedule(x=torch.ones(1))


@pytest.fixture
def four_intra_op_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_intra_op_threads")
def test_threads_share_out_the_intra_op_threads_and_leave_the_callers_alone():
    with asc.schedule(fork(), CPUS, backend="threads") as schedule:
        assert schedule() == {"t0": 2, "t1": 2}
        assert torch.get_num_threads() == 4
        assert schedule() == {"t0": 2, "t1": 2}
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_intra_op_threads")
def test_threads_that_begin_later_have_all_intra_op_threads():
    """A run with a timeout may start a thread, whose number torch would give to others."""
    found = []
    with asc.schedule(fork(), CPUS, backend="threads") as schedule:
        for timeout in (None, 30.0):
            schedule(timeout=timeout)
            later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            later.start()
            later.join()
    assert found == [4, 4]


@pytest.mark.usefixtures("four_intra_op_threads")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_calling_thread_has_all_its_intra_op_threads_after_an_error_too(error):
    def fail():
        assert torch.get_num_threads() == 2
        raise error

    graph = fork(fail, 1)
    graph.add(type, 0)
    with (
        asc.schedule(graph, CPUS, backend="threads") as schedule,
        pytest.raises((asc.TaskError, KeyboardInterrupt)),
    ):
        schedule()
    assert torch.get_num_threads() == 4


def test_the_calling_thread_executes_the_stream_that_computes_first():
    with asc.schedule(fork(threading.get_ident), CPUS, backend="threads") as schedule:
        assert schedule()["t0"] == threading.get_ident() != schedule()["t1"]
        assert schedule(timeout=30.0)["t0"] != threading.get_ident()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        lambda: torch.device("meta"),
        FakeTensorMode,
    ],
)
def test_a_mode_of_the_calling_thread_applies_to_no_stream(mode):
    def product():
        x = torch.ones(2, 2)
        return x @ x

    with asc.schedule(fork(product), CPUS, backend="threads") as schedule:
        schedule()
        with mode():
            found = schedule()
    assert {type(item) for item in found.values()} == {torch.Tensor}
    for item in found.values():
        assert (item.dtype, item.device.type) == (torch.float32, "cpu")
        assert not item.is_inference()


# ---- emulated and virtual


@pytest.mark.parametrize("how", ["positional", "keyword", "merged"])
def test_here_is_the_device_of_the_task(how):
    def task(x, device):
        return x + torch.arange(4.0, device=device)

    graph = asc.Graph()
    x, here = graph.input("x"), asc.Here("cpu")
    with graph.on("cuda:1"):
        y = graph.add(task, x, device=here) if how == "keyword" else graph.add(task, x, here)
        graph.output(y=graph.add(torch.add, y, graph.add(torch.ones, 4, device=here)))
    if how == "merged":
        graph = asc.merge(graph, {task.name: "all" for task in graph.tasks})
    x = torch.arange(4.0)
    with asc.schedule(graph, TWO_GPUS) as schedule:
        assert torch.equal(schedule(x=x)["y"], 2 * x + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
)
def test_freed_memory_is_all_nan(dtype):
    base = torch.ones(4, dtype=dtype)
    Emulated().free(Stream("cuda:0", "compute"))({"part": [base[::2]], "number": 3})
    assert base.isnan().tolist() == [True, False, True, False]


def test_modelled_time_passes_for_real_however_short_the_work():
    """A task that takes 0.02 s and another behind it: what a profile measures cannot be less than the model says."""
    costs = asc.Costs(default_seconds=0.02)
    with asc.schedule(
        chain(torch.clone, torch.clone), TWO_GPUS, policy="single", costs=costs
    ) as schedule:
        assert schedule.profile(x=torch.ones(1)).makespan >= schedule.makespan == 0.04


# ---- accelerator, without one


def test_devices_that_are_not_there_are_named_with_what_would_do():
    machine = asc.Machine([asc.Device("cpu"), asc.Device("npu:7")], [asc.Link("cpu", "npu:7", 1e9)])
    message = (
        r"device 'npu:7' is not there \(accelerators here: .*\); backend='emulated' can emulate it, and "
        r"Machine.local\(gpus=n\) makes logical devices of those there are"
    )
    with (
        asc.schedule(chain(torch.clone), machine) as schedule,
        pytest.raises(asc.MachineError, match=message),
    ):
        schedule(x=torch.ones(1))


def test_the_accelerator_backend_runs_cpu_streams_too():
    with asc.schedule(fork(threading.get_ident), CPUS, backend="accelerator") as schedule:
        assert len(set(schedule().values())) == 2
        assert schedule.run_serial() == dict.fromkeys(["t0", "t1"], threading.get_ident())
        assert sorted(span.name for span in schedule.profile().spans) == ["t0", "t1"]


HOST_BEFORE = """
    cpu/compute      run a
    cpu/compute      record e0
    cuda:0/copy-in   wait e0
    cuda:0/copy-in   copy a <- cpu
    cuda:0/copy-in   record e1
    cuda:0/compute   wait e1
    cuda:0/compute   run b
    cuda:1/compute   run c
    cuda:1/compute   record e2
    cuda:1/copy-out  wait e2
    cuda:1/copy-out  copy c -> cpu
"""
HOST_AFTER = """
    cuda:0/compute   run a
    cuda:0/compute   record e0
    cuda:0/copy-out  wait e0
    cuda:0/copy-out  copy a -> cpu
    cuda:0/copy-out  record e1
    cpu/compute      wait e1
    cpu/compute      run b
"""
MEETING = """
    cpu/compute      run a
    cpu/compute      record e0
    cuda:0/copy-out  wait e0
    cuda:0/copy-out  copy x -> cuda:1/copy-in
    cuda:1/copy-in   record e1
    cuda:2/compute   wait e1
    cuda:2/compute   run b
    cuda:1/compute   run c
"""


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (HOST_BEFORE, ["cpu/compute", "cuda:0/compute", "cuda:0/copy-in"]),
        (HOST_AFTER, ["cpu/compute"]),
        (MEETING, ["cpu/compute", "cuda:0/copy-out", "cuda:1/copy-in", "cuda:2/compute"]),
        ("cuda:0/compute run a", []),
    ],
    ids=["host before", "host after", "meeting", "no host"],
)
def test_streams_that_wait_for_the_host_however_indirectly_get_threads_of_their_own(text, own):
    program = Program.parse(text)
    gpu = {stream for stream in program.streams if stream.device != "cpu"}
    assert sorted(map(str, waiting_for_host(program, gpu))) == own


def test_streams_are_made_once_and_never_more_than_torch_has(monkeypatch):
    """The pool of torch would hand out its first stream again as the 33rd, and two names would silently be one."""
    numbers = itertools.count()
    monkeypatch.setattr(accelerator, "_streams", {})
    monkeypatch.setattr(torch, "Stream", lambda device, priority: next(numbers) % 32)
    device = torch.device("cpu")
    made = [accelerator.pooled(device, Stream("cuda:0", f"s{i}")) for i in range(32)]
    assert made == list(range(32))
    assert accelerator.pooled(device, Stream("cuda:0", "s7")) == 7
    with pytest.raises(
        asc.MachineError,
        match="cpu has no stream left for cuda:0/s32: torch repeats itself after 32",
    ):
        accelerator.pooled(device, Stream("cuda:0", "s32"))
