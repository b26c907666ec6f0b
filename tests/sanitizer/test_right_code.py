"""Right code that uses streams, as people write it: nothing is found."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autosched.sanitizer import sanitize


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def model(device: str = "cuda") -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)


class Prefetcher:
    """Loads the next batch while the last one is used."""

    def __init__(self, batches: Iterator[torch.Tensor]):
        self.batches, self.stream = batches, torch.cuda.Stream()
        self.following: torch.Tensor | None = None
        self.load()

    def load(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self.following = None
            return
        with torch.cuda.stream(self.stream):
            self.following = batch.cuda(non_blocking=True)

    def next(self) -> torch.Tensor | None:
        main().wait_stream(self.stream)
        batch = self.following
        if batch is not None:
            batch.record_stream(main())
            self.load()
        return batch


def prefetching() -> torch.Tensor:
    data = iter([torch.full((4, 4), float(i)).pin_memory() for i in range(4)])
    batches, net = Prefetcher(data), model()
    optimizer = torch.optim.Adam(net.parameters())
    while (batch := batches.next()) is not None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return net[0].weight.detach()


def double_buffering() -> torch.Tensor:
    """Two buffers, with events for both directions; the first waits are for events without a record."""
    copies = torch.cuda.Stream()
    host = [torch.full((4,), float(i)).pin_memory() for i in range(6)]
    buffers = [torch.empty(4, device="cuda") for _ in range(2)]
    copies.wait_stream(main())
    full = [torch.cuda.Event() for _ in range(2)]
    free = [torch.cuda.Event() for _ in range(2)]
    total = torch.zeros(4, device="cuda")
    for i, source in enumerate(host):
        k = i % 2
        with torch.cuda.stream(copies):
            free[k].wait()
            buffers[k].copy_(source, non_blocking=True)
            full[k].record()
        full[k].wait()
        total += buffers[k]
        free[k].record()
    return total


def reducing_gradients_on_a_side_stream() -> torch.Tensor:
    nets, side = [model("cuda:0"), model("cuda:1")], torch.cuda.Stream("cuda:0")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(2):
        for i, net in enumerate(nets):
            optimizers[i].zero_grad()
            with torch.cuda.device(i):
                net(torch.ones(2, 4, device=f"cuda:{i}")).sum().backward()
        side.wait_stream(torch.cuda.current_stream("cuda:0"))
        with torch.cuda.stream(side):
            for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                one.grad.add_(other.grad.to("cuda:0"))
                other.grad.copy_(one.grad)
                one.grad.record_stream(side)
        torch.cuda.current_stream("cuda:0").wait_stream(side)
        torch.cuda.current_stream("cuda:1").wait_stream(torch.cuda.current_stream("cuda:0"))
        for optimizer in optimizers:
            optimizer.step()
    return nets[0][0].weight.detach()


def inference_on_several_streams() -> list[torch.Tensor]:
    net, outputs = model().eval(), []
    with torch.no_grad():
        for _ in range(4):
            stream = torch.cuda.Stream()
            x = torch.ones(2, 4, device="cuda")
            stream.wait_stream(main())
            with torch.cuda.stream(stream):
                y = net(x)
            x.record_stream(stream)
            main().wait_stream(stream)
            y.record_stream(main())
            outputs.append(y)
    return outputs


def averaging_on_a_side_stream() -> torch.Tensor:
    net, side = model(), torch.cuda.Stream()
    average = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4, device="cuda")).sum().backward()
        main().wait_stream(side)
        optimizer.step()
        side.wait_stream(main())
        with torch.cuda.stream(side), torch.no_grad():
            for slow, fast in zip(average.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    main().wait_stream(side)
    return average[0].weight.detach()


def offloading_activations() -> torch.Tensor:
    side, net = torch.cuda.Stream(), model()

    def pack(item: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        side.wait_stream(main())
        with torch.cuda.stream(side):
            host = item.to("cpu", non_blocking=True)
            item.record_stream(side)
        return host, side.record_event()

    def unpack(packed: tuple[torch.Tensor, torch.cuda.Event]) -> torch.Tensor:
        host, _ = packed
        with torch.cuda.stream(side):
            back = host.to("cuda", non_blocking=True)
        main().wait_stream(side)
        back.record_stream(main())
        return back

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = net(torch.ones(2, 4, device="cuda")).square().sum()
    loss.backward()
    return net[0].weight.grad + 1


def training_with_a_graph() -> torch.Tensor:
    """Whole-network capture, as torch's notes on CUDA graphs have it."""
    net, lossfn = model(), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(2, 4, device="cuda"), torch.randn(2, 4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            lossfn(net(x), y).backward()
            optimizer.step()
    main().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = lossfn(net(x), y)
        loss.backward()
        optimizer.step()
    for i in range(3):
        x.copy_(torch.full((2, 4), float(i), device="cuda"))
        y.fill_(i)
        graph.replay()
    return loss


def data_parallel_threads() -> list[torch.Tensor]:
    nets = [model(f"cuda:{i}") for i in range(2)]
    found: list[Any] = [None, None]

    def work(i: int) -> None:
        with torch.cuda.device(i):
            found[i] = nets[i](torch.ones(2, 4, device=f"cuda:{i}")).sum()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loss = found[0] + found[1].to("cuda:0")
    loss.backward()
    return [net[0].weight.grad for net in nets]


def torchs_data_parallel(pinned: bool) -> Callable[[], torch.Tensor]:
    """Torch copies the batch on streams of its own if the host has it."""

    def program() -> torch.Tensor:
        net = nn.DataParallel(nn.Sequential(model(), nn.BatchNorm1d(4)).to(0))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            batch = torch.ones(6, 4)
            batch = batch.pin_memory() if pinned else batch.to(0)
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return net.module[0][0].weight.detach()

    return program


def loading_in_a_thread(waits: bool = True) -> Callable[[], torch.Tensor]:
    """A thread hands batches over by a queue, each with an event behind its copy."""

    def program() -> torch.Tensor:
        loads, batches = torch.cuda.Stream(), queue.Queue[Any](maxsize=2)

        def load() -> None:
            with torch.cuda.stream(loads):
                for i in range(4):
                    batch = torch.full((4,), float(i)).pin_memory().cuda(non_blocking=True)
                    batches.put((batch, loads.record_event()))
            batches.put(None)

        thread = threading.Thread(target=load)
        thread.start()
        total = torch.zeros(4, device="cuda")
        while (item := batches.get()) is not None:
            batch, loaded = item
            if waits:
                main().wait_event(loaded)
            total += batch
            batch.record_stream(main())
        thread.join()
        main().wait_stream(loads)
        return total

    return program


def threads_that_share_a_model() -> list[torch.Tensor]:
    """A lock keeps them apart, and each works on a stream of its own."""
    net, lock, started = model().eval(), threading.Lock(), threading.Event()
    streams = [torch.cuda.Stream() for _ in range(2)]
    cache = torch.zeros(4, device="cuda")
    for stream in streams:
        stream.wait_stream(main())
    last: list[torch.cuda.Event] = [main().record_event()]

    def answer(stream: torch.cuda.Stream) -> torch.Tensor:
        started.wait()
        with torch.no_grad(), torch.cuda.stream(stream):
            x = net(torch.ones(2, 4, device="cuda")).sum(0)
            with lock:
                last[-1].wait()
                cache.add_(x)
                last.append(stream.record_event())
        return x

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(answer, stream) for stream in streams]
        started.set()
        found = [future.result() for future in futures]
    for stream, item in zip(streams, found, strict=True):
        main().wait_stream(stream)
        item.record_stream(main())
    return [*found, cache]


def mixed_precision_with_a_loader() -> torch.Tensor:
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4, pin_memory=True)
    for (batch,) in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = net(batch.to("cuda", non_blocking=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def the_generic_interface() -> torch.Tensor:
    stream, event = torch.Stream("cuda"), torch.Event("cuda")
    x = torch.ones(4, device="cuda")
    event.record()
    stream.wait_event(event)
    with stream:
        y = x + 1
    torch.accelerator.current_stream().wait_stream(stream)
    torch.accelerator.synchronize()
    return y


def reading_results_on_the_host() -> list[float]:
    host = torch.empty(4).pin_memory()
    done = torch.cuda.Event()
    host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    done.record()
    while not done.query():
        pass
    return host.tolist()


def graphs_that_share_a_pool(ordered: bool) -> Callable[[], torch.Tensor]:
    """Temporary memory of one graph is that of the other, so they must not be replayed at once."""

    def program() -> torch.Tensor:
        x, a, b = (torch.ones(4, device="cuda") for _ in range(3))
        one, other, side = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(one):
            torch.mul(x + 1, 2, out=a)
        with torch.cuda.graph(other, pool=one.pool()):
            torch.mul(x + 2, 2, out=b)
        side.wait_stream(main())
        one.replay()
        if ordered:
            side.wait_stream(main())
        with torch.cuda.stream(side):
            other.replay()
        main().wait_stream(side)
        return a + b

    return program


def graphed_callables() -> torch.Tensor:
    net, x = model(), torch.ones(2, 4, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(net, (x,))(x).sum().backward()
    return net[0].weight.grad


def many_layers() -> torch.Tensor:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(2),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.LSTM(4, 8),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(2, 3, 8, 8, device="cuda"))[0].square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net[0].weight.detach()


def test_a_batch_of_a_thread_is_waited_for() -> None:
    found = sanitize(loading_in_a_thread(waits=False)).findings
    assert {finding.kind for finding in found} >= {"race"}


def test_graphs_that_share_a_pool_are_not_replayed_at_once() -> None:
    found = sanitize(graphs_that_share_a_pool(False)).findings
    assert {finding.kind for finding in found} == {"lifetime"}


PROGRAMS = [
    prefetching,
    double_buffering,
    reducing_gradients_on_a_side_stream,
    inference_on_several_streams,
    averaging_on_a_side_stream,
    offloading_activations,
    training_with_a_graph,
    data_parallel_threads,
    loading_in_a_thread(),
    threads_that_share_a_model,
    torchs_data_parallel(True),
    torchs_data_parallel(False),
    mixed_precision_with_a_loader,
    the_generic_interface,
    reading_results_on_the_host,
    graphs_that_share_a_pool(True),
    graphed_callables,
    many_layers,
]


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_right_code_is_silent(program: Callable[[], Any], numbers: bool) -> None:
    report = sanitize(program, gpus=2, numbers=numbers)
    assert not report.findings, str(report)
    assert report.operations
