"""Serve a model that is split over two devices: requests are answered while others are computed.

Clients ask at random times, and each awaits its answer. The first half of the model computes one
request while the second half computes the one before it. Compared with calls, which have one
request under way at a time. On emulated GPUs, so that the times are those of the model of the
machine, on any computer. Exit code 1 if an answer differs from the model's own.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor, nn

import autosched as asc

WIDTH = 64
SECONDS = 0.02  # of each half of the model, on its device
CLIENTS = 8

Answer = Callable[[Tensor], Awaitable[Tensor]]


def split(model: nn.Sequential) -> asc.Graph:
    """Return a graph with each half of the model on its own device."""
    graph = asc.Graph("served")
    hidden = graph.add(model[:2], graph.input("x"), on="cuda:0", seconds=SECONDS)
    graph.output(y=graph.add(model[2:], hidden, on="cuda:1", seconds=SECONDS))
    return graph


async def client(answer: Answer, number: int, requests: int) -> list[tuple[Tensor, Tensor]]:
    """Ask several times; return questions and answers."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(requests):
        x = torch.randn(1, WIDTH, generator=generator)
        found.append((x, await answer(x)))
    return found


async def serve(answer: Answer, requests: int) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Answer all clients; return questions and answers, and requests per second."""
    start = time.perf_counter()
    asking = [client(answer, number, requests) for number in range(CLIENTS)]
    found = [pair for pairs in await asyncio.gather(*asking) for pair in pairs]
    return found, len(found) / (time.perf_counter() - start)


def overlapping(schedule: asc.Schedule) -> Answer:
    """Answer with several requests in flight.

    ``submit`` blocks the event loop while there is no room, so requests wait for room before.
    """
    room = asyncio.Semaphore(schedule.program.in_flight)

    async def answer(x: Tensor) -> Tensor:
        async with room:
            return (await schedule.submit(x=x))["y"]

    return answer


def one_by_one(schedule: asc.Schedule) -> Answer:
    """Answer one request after another."""

    async def answer(x: Tensor) -> Tensor:
        return (await asyncio.to_thread(schedule, x=x))["y"]

    return answer


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ask less often")
    parser.add_argument("--folder", help="for pictures, of which there are none")
    requests = 3 if parser.parse_args().quick else 25
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Softmax(1)]
    model = nn.Sequential(*layers).eval()
    machine = asc.Machine.emulated(gpus=2)
    rates = []
    for in_flight, way in ((1, one_by_one), (3, overlapping)):
        with asc.schedule(split(model), machine, in_flight=in_flight) as schedule:
            schedule(x=torch.zeros(1, WIDTH))  # the first run is checked
            found, rate = asyncio.run(serve(way(schedule), requests))
        rates.append(rate)
        equal = all(torch.equal(answer, model(x)) for x, answer in found)
        print(f"{in_flight} in flight: {rate:.1f} requests/s; answers equal the model's: {equal}")
        if not equal:
            return 1
    print(f"    {rates[1] / rates[0]:.2f} times as many")
    return 0


if __name__ == "__main__":
    sys.exit(main())
