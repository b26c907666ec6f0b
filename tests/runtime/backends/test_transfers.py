"""Copies to and from GPUs: what arrives, how it lies in memory, who waits, and whose memory it is. On played GPUs."""

from contextlib import contextmanager
from itertools import cycle, product

import pytest
import torch

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.runtime.backends import accelerator
from autosched.runtime.backends.accelerator import Accelerator, DeviceCopy, Staging
from autosched.runtime.execute import Executor
from autosched.simulated_gpus import playing
from autosched.simulated_gpus.hardware import Hardware

CPU, ONE, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
ENDS = {
    "to a GPU": (CPU, ONE),
    "to the host": (ONE, CPU),
    "between GPUs": (ONE, OTHER),
    "on one GPU": (ONE, ONE),
}

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "transposed, with gaps": lambda x: x[1::3].t(),
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "overlapping": lambda x: x.flatten().unfold(0, 5, 2),
    "a part": lambda x: x[2:4, 1:],
    "one number": lambda x: x[1, 1],
    "nothing": lambda x: x[:0],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64]


@pytest.fixture(autouse=True)
def played_anew(monkeypatch):
    """Let streams be those of one played machine, and pieces so small that small tensors need several."""
    monkeypatch.setattr(accelerator, "_streams", {})
    monkeypatch.setattr(accelerator, "PIECE", 64)


@contextmanager
def a_way(ends, pool=None, seed=0):
    """Play a way between two devices whose copy streams are current."""
    with playing(gpus=2, seed=seed) as gpus:
        streams = [torch.Stream(end) for end in ends if end.type != "cpu"]
        for stream in streams:
            torch.accelerator.set_stream(stream)
        yield gpus, DeviceCopy(*ends, streams, pool or Staging()), streams


def whole(dtype):
    return torch.arange(12 * 14).reshape(12, 14).to(dtype)


# ---- what arrives


def check_layouts(way, streams, ends, pin):
    for layout, dtype in zip(LAYOUTS, cycle(DTYPES)):
        base = whole(dtype)
        given = LAYOUTS[layout](
            base.to(ends[0]) if ends[0] != CPU else base.pin_memory() if pin else base
        )
        torch.accelerator.synchronize(ONE)
        found, expected = way(given, None), LAYOUTS[layout](base)
        for stream in streams:
            stream.synchronize()
        assert (found.device, found.dtype) == (ends[1], dtype)
        assert found.stride() == expected.stride() or not expected.numel()
        assert torch.equal(found.cpu(), expected), layout
        assert (
            found.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
            or not expected.numel()
        )


@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_a_copy_has_the_numbers_and_the_strides_of_the_original(ends, pin):
    with a_way(ends) as (_, way, streams):
        check_layouts(way, streams, ends, pin)


@pytest.mark.cuda
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("kind", [kind for kind in ENDS if kind != "between GPUs"])
def test_on_accelerators_a_copy_has_the_numbers_and_the_strides_of_the_original(kind, pin):
    stream = torch.Stream(ONE)
    with stream:
        check_layouts(DeviceCopy(*ENDS[kind], [stream], Staging()), [stream], ENDS[kind], pin)


@pytest.mark.multigpu
def test_on_accelerators_a_copy_between_two_keeps_numbers_and_strides():
    streams = [torch.Stream(ONE), torch.Stream(OTHER)]
    with streams[0], streams[1]:
        check_layouts(DeviceCopy(ONE, OTHER, streams, Staging()), streams, (ONE, OTHER), False)


ARRANGED = {  # the shape of some memory, and where 6 times 5 numbers lie in it
    "rows": ((6, 5), lambda x: x),
    "columns": ((5, 6), lambda x: x.t()),
    "rows with gaps": ((6, 10), lambda x: x[:, ::2]),
    "columns with gaps": ((15, 6), lambda x: x[::3].t()),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_what_is_copied_over_a_tensor_leaves_its_gaps_alone(ends):
    pool = Staging()
    with a_way(ends, pool) as (_, way, streams):
        for mine, theirs in product(ARRANGED, repeat=2):
            (shape, inside), (other_shape, other) = ARRANGED[mine], ARRANGED[theirs]
            memory = torch.zeros(shape, device=ends[1])
            old, new = inside(memory), other(torch.rand(other_shape).to(ends[0]))
            assert way(new, old) is old
            for stream in streams:
                stream.synchronize()
            pool.unstage()
            assert torch.equal(old.cpu(), new.cpu())
            old.zero_()
            assert not memory.cpu().any()


def test_a_tree_keeps_its_kind_and_what_is_no_tensor_is_copied_too():
    with a_way((CPU, ONE)) as (_, way, _):
        names = ["a"]
        found = way({"x": (torch.ones(2), 3), "names": names}, None)
        assert found["x"][0].device == ONE
        assert found["x"][1] == 3
        assert found["names"] == names
        assert found["names"] is not names


# ---- who waits


@pytest.mark.parametrize("over", [False, True], ids=["fresh", "over"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_who_issues_a_copy_is_not_held(ends, over, monkeypatch):
    """Nor need the source be kept: pageable memory is read when the copy is issued."""
    pool = Staging()
    with a_way(ends, pool) as (_, way, streams):
        given = whole(torch.float32).to(ends[0])
        into = torch.zeros(12, 14, device=ends[1]) if over else None
        with monkeypatch.context() as patch:
            patch.setattr(Hardware, "until", lambda *_: pytest.fail("the host waits"))
            found = way(given, into)
        if ends[0] == CPU:
            given.zero_()
        for stream in streams:
            stream.synchronize()
        pool.unstage()
        assert torch.equal(found.cpu(), whole(torch.float32))


@pytest.mark.cuda
@pytest.mark.parametrize("ends", [(CPU, ONE), (ONE, CPU)], ids=["to a GPU", "to the host"])
def test_on_accelerators_pageable_memory_holds_nobody_who_issues_a_copy(ends, monkeypatch):
    """The stream is still asleep when the call returns."""
    monkeypatch.setattr(accelerator, "PIECE", 2**20)
    stream, pool, n = torch.Stream(ONE), Staging(), 2**20
    pieces = [pool.take(2**20, stream) for _ in range(4)]  # takes longer than a sleep
    del pieces
    given, into = torch.rand(n).to(ends[0]), torch.zeros(n).to(ends[1])
    expected = given.cpu().clone()
    torch.accelerator.synchronize(ONE)
    with stream:
        torch.cuda._sleep(200_000_000)
        found = DeviceCopy(*ends, [stream], pool)(given, into)
        asleep = not stream.query()
        if ends[0] == CPU:
            given.zero_()
    stream.synchronize()
    pool.unstage()
    assert asleep
    assert torch.equal(found.cpu(), expected)


BETWEEN = """
    cuda:0/compute   run a
    cuda:0/compute   record e0
    cuda:{waits} wait e0
    cuda:0/copy-out  copy a -> cuda:1/copy-in
    cuda:{records} record e1
    cuda:1/compute   wait e1
    cuda:1/compute   run b
    cuda:1/compute   record e2
    cuda:1/copy-in   wait e2
    cuda:1/copy-in   free a
    cuda:0/compute   wait e1
    cuda:0/compute   free a
    output b on cuda:1
"""


@pytest.mark.parametrize("records", ["0/copy-out", "1/copy-in"])
@pytest.mark.parametrize("waits", ["0/copy-out", "1/copy-in"])
@pytest.mark.parametrize("gpus", [2, 1])
def test_a_copy_between_gpus_stands_in_the_order_of_both_streams(gpus, waits, records):
    """It waits for what either of its streams has waited for, and whoever waits for either has it."""
    graph = asc.Graph()
    a = graph.add(lambda: torch.ones(100, device="cuda:0") + 1, name="a", on="cuda:0")
    graph.output(b=graph.add(lambda a: a + 1, a, name="b", on="cuda:1"))
    program = asc.Program.parse(BETWEEN.format(waits=waits, records=records))
    asc.verify(program, graph)
    for seed in range(6):
        accelerator._streams.clear()
        with playing(gpus, seed=seed):
            executor = Executor(
                program, graph, asc.Machine.local(gpus=2), Accelerator(), [0.0] * len(program)
            )
            for _ in range(2):
                assert executor({})["b"].cpu().tolist() == [3.0] * 100
            executor.close()


def test_where_much_is_staged_the_host_waits_for_the_stream(monkeypatch):
    monkeypatch.setattr(accelerator, "_LIMIT", 128)
    for seed, ends in product(range(5), [(CPU, ONE), (ONE, CPU)]):
        pool = Staging()
        with a_way(ends, pool, seed) as (_, way, streams):
            given = [(whole(torch.float32) + i).to(ends[0]) for i in range(3)]
            found = [way(each, torch.zeros(12, 14, device=ends[1])) for each in given]
            streams[0].synchronize()
            pool.unstage()
            for each, expected in zip(found, given, strict=True):
                assert torch.equal(each.cpu(), expected.cpu())


# ---- in a schedule


def run_often(graph, check, seeds=5, **facts):
    """Run a schedule on two played GPUs under some adversaries."""
    for seed in range(seeds):
        accelerator._streams.clear()
        with (
            playing(gpus=2, seed=seed),
            asc.schedule(graph, asc.Machine.local(), policy="heft", **facts) as schedule,
        ):
            for _ in range(2):
                check(schedule)


RELAYED = """
    input w on cpu
    cuda:0/copy-in   copy w <- cpu
    cuda:0/copy-in   record e0
    cuda:0/compute   wait e0
    cuda:0/compute   run double
    cuda:0/compute   record e1
    cuda:0/copy-out  wait e1
    cuda:0/copy-out  copy w@1 -> cpu overwriting
    cuda:0/copy-out  record e2
    {reader}
    cuda:1/copy-in   wait e2
    cuda:1/copy-in   copy w@1 <- cpu
    cuda:1/copy-in   record e3
    cuda:1/compute   wait e3
    cuda:1/compute   run more
    cuda:1/compute   record e4
    cuda:0/copy-in   wait e2
    cuda:0/copy-in   free w@1
    cuda:1/copy-in   wait e4
    cuda:1/copy-in   free w@1
    output more on cuda:1
"""
READER = "cpu/compute wait e2\n cpu/compute run sum"


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "with gaps"])
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("reader", [READER, ""], ids=["read there", "sent on"])
def test_what_comes_back_over_a_callers_memory_is_there_for_whoever_reads_it_next(
    reader, pin, dense
):
    graph = asc.Graph()
    w = graph.input("w")
    graph.add(lambda w: w.mul_(2), w, writes=[w], outputs=(), name="double", on="cuda:0")
    graph.output(more=graph.add(lambda w: w + 1, w, name="more", on="cuda:1"))
    seen = []
    if reader:
        graph.add(lambda w: seen.append(w.clone()), w, outputs=(), name="sum", on="cpu")
    program = asc.Program.parse(RELAYED.format(reader=reader))
    for seed in range(5):
        accelerator._streams.clear()
        with playing(gpus=2, seed=seed):
            executor = Executor(
                program, graph, asc.Machine.local(), Accelerator(), [0.0] * len(program)
            )
            for _ in range(2):
                base = torch.arange(300.0).pin_memory() if pin else torch.arange(300.0)
                w = base if dense else base[::2]
                expected = w * 2
                out = executor({"w": w})
                assert torch.equal(w, expected)
                assert torch.equal(out["more"].cpu(), expected + 1)
                assert all(torch.equal(each, expected) for each in seen)
                assert dense or torch.equal(base[1::2], torch.arange(1.0, 300.0, 2))
            executor.close()


def test_after_an_interrupt_the_streams_are_the_callers_and_nothing_lands_any_more(monkeypatch):
    graph = asc.Graph()
    w = graph.input("w")
    graph.add(lambda w: w.add_(1), w, writes=[w], outputs=(), name="add", on="cuda:0")

    def interrupt(stream):
        raise KeyboardInterrupt

    with playing(), asc.schedule(graph, asc.Machine.local(), policy="heft") as schedule:
        before = torch.accelerator.current_stream(ONE)
        w = torch.zeros(50)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Stream, "synchronize", interrupt)
            with pytest.raises(KeyboardInterrupt):
                schedule(w=w)
        assert torch.accelerator.current_stream(ONE) == before
        w.fill_(5)
        schedule(w=torch.zeros(50))
        assert w.tolist() == [5.0] * 50


def chained():
    graph = asc.Graph()
    y = graph.add(lambda x: x + 1, graph.input("x"), name="one", on="cuda:0")
    graph.output(y=graph.add(lambda x: x * 2, y, name="two", on="cuda:1"))
    return graph


def test_inputs_on_a_gpu_may_be_dropped_as_soon_as_the_call_returns():
    """The played GPU writes over memory that goes back, and notes who reads it then."""

    def check(schedule):
        y = schedule(x=torch.ones(50, device="cuda:0"))["y"]
        other = torch.full((50,), 5.0, device="cuda:0")
        assert y.cpu().tolist() == [4.0] * 50
        assert other.cpu().tolist() == [5.0] * 50

    run_often(chained(), check, inputs={"x": "cuda:0"}, outputs={"y": "cuda:1"})


# ---- memory


def held(schedule, device, **inputs):
    """Return what one run takes on a device, at its highest, beyond what is held before."""
    schedule(**inputs)
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    schedule(**inputs)
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


def many_tasks(gpu, n):
    """Return a graph of elementwise tasks, of which some results live long; a value has ``4 * n`` bytes."""
    graph = asc.Graph()
    values = [graph.input("x")]
    for i in range(12):
        first, second = values[i // 2], values[i]
        values.append(graph.add(torch.add, first, second, name=f"v{i}", nbytes=4 * n, on=gpu))
    graph.output(y=values[-1])
    return graph


def check_peak(machine, n):
    gpu = machine.names[1]
    real = torch.device(machine.device(gpu).physical)
    costs = asc.Costs(default_nbytes=4 * n)
    with asc.schedule(
        many_tasks(gpu, n), machine, policy="heft", costs=costs, outputs={"y": gpu}
    ) as schedule:
        predicted = schedule.peak_bytes[gpu]
        assert held(schedule, real, x=torch.rand(n)) == pytest.approx(predicted, rel=0.05)
        assert predicted > 4 * 4 * n


def test_a_gpu_holds_what_is_predicted():
    with playing():
        check_peak(asc.Machine.local(), 2_560)


@pytest.mark.cuda
def test_on_accelerators_a_device_holds_what_is_predicted(monkeypatch):
    monkeypatch.setattr(accelerator, "PIECE", 4 << 20)
    for gpus in (1, 2):
        check_peak(asc.Machine.local(gpus=gpus), 10_000_000)


def test_a_local_gpu_has_memory_which_logical_devices_share():
    with playing(nbytes=2**34):
        assert asc.Machine.local(gpus=1).device("cuda:0").nbytes == 15 * 2**30
        machine = asc.Machine.local(gpus=2)
        assert [machine.device(name).nbytes for name in machine.names[1:]] == [7.5 * 2**30] * 2


def test_what_does_not_fit_a_gpu_is_refused_with_what_takes_the_memory():
    with playing(nbytes=2**16):
        machine = asc.Machine.local()
        with pytest.raises(
            MemoryLimitError,
            match=r"task 'v0' fits on no device .* takes 80,000 B of 61,440 B on cuda:0",
        ):
            asc.schedule(
                many_tasks("cuda:0", 10_000), machine, costs=asc.Costs(default_nbytes=40_000)
            )


# ---- streams


def test_who_waits_for_a_copy_of_what_has_gaps_may_wait_on_either_stream():
    """Its last step, which spreads it, is on the target's stream alone; the event is recorded on the source's."""
    graph = asc.Graph()
    (z,) = graph.inputs("z")
    with graph.on("cuda:0"):
        part = z[:, :1]
    with graph.on("cuda:1"):
        graph.output(y=part + 1)
    for seed in range(10):
        with (
            playing(gpus=2, seed=seed),
            asc.schedule(graph, asc.Machine.local(gpus=2), inputs="cuda:0") as schedule,
        ):
            given = torch.randn(3, 4)
            assert torch.equal(schedule(z=given.to("cuda:0"))["y"].cpu(), given[:, :1] + 1), seed
