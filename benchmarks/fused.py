"""Compare fused regions with eager execution and with torch.compile on a CPU.

Training steps: one region, or few, for forward, backward and optimizer, compared with torch.compile
of the model with an eager optimizer, and with a compiled ``optimizer.step``. Inference on one
stream, and on two streams for networks with branches. All contestants of a case take turns. Runs of
a turn are measured after 30 ms of others, when the threads of the contestant before have gone to sleep.
Compile times are of new processes and an empty cache of Inductor: from the first call to the end of
the second one, since a training step is compiled again when its optimizer has state. What is
compiled once on a machine is there: headers of Inductor, and extension modules of autosched.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from _report import parser, publish, table
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional

import autosched as asc

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from networks import Branches, Conv, Wiring, chain, head

Run = Callable[[], object]

SETTLING = 0.03  # seconds of runs before those that are measured


class Contestant(NamedTuple):
    """A way to run a case: what prepares it, the number of torch's threads, and its call."""

    name: str
    threads: int
    make: Callable[[], Run]


# ---- models


class Transformer(nn.Module):
    """An encoder of two layers over embedded words, and the scores of the next word."""

    def __init__(self, words: int = 256, width: int = 64):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (n, words) for words of shape (n, length)."""
        return self.out(self.encoder(self.embed(x)).mean(1))


class Recurrent(nn.Module):
    """An LSTM written with cells, as a loop over time."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (n, 10) for a sequence of shape (n, time, width)."""
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0])


class Mixture(nn.Module):
    """A mixture of experts in which all experts compute, and a gate weights them."""

    def __init__(self, width: int = 256, experts: int = 8):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            chain(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of ``x``, (n, width)."""
        weights = torch.softmax(self.gate(x), 1)
        parts = [expert(x) for expert in self.experts]
        return sum(
            (weights[:, i, None] * part for i, part in enumerate(parts[1:], 1)),
            weights[:, 0, None] * parts[0],
        )


def inception_like(blocks: int = 8) -> nn.Module:
    def block() -> nn.Module:
        return Branches(*(chain(Conv(64, 32), Conv(32, 16, 3)) for _ in range(4)))

    return chain(Conv(3, 64, 3, 2), *(block() for _ in range(blocks)), head(64, 10))


def randomly_wired() -> nn.Module:
    wirings = [Wiring(32, 32, 12, seed=1), Wiring(32, 64, 12, seed=2)]
    return chain(Conv(3, 32, 3, 2), *wirings, nn.ReLU(), head(64, 10))


def mlp(depth: int = 3, width: int = 128) -> nn.Module:
    inner = (m for _ in range(depth - 1) for m in (nn.Linear(width, width), nn.ReLU()))
    return chain(*inner, nn.Linear(width, 10))


def conv_net() -> nn.Module:
    layers = (Conv(3, 16, 3), Conv(16, 32, 3, 2), Conv(32, 32, 3))
    return chain(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _labels() -> Tensor:
    return torch.randint(0, 10, (32,))


TRAINING: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "MLP": (mlp, lambda: (torch.randn(32, 128), _labels())),
    "transformer": (Transformer, lambda: (torch.randint(0, 256, (32, 16)), _labels())),
    "conv net": (conv_net, lambda: (torch.randn(32, 3, 16, 16), _labels())),
    "LSTM": (Recurrent, lambda: (torch.randn(32, 8, 64), _labels())),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
}


def networks() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield the networks for inference on one stream, with their inputs."""
    import transformers as hf

    size = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    bert = hf.BertConfig(vocab_size=1000, intermediate_size=512, **size)
    gpt2 = hf.GPT2Config(vocab_size=1000, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    vit = hf.ViTConfig(image_size=64, patch_size=8, intermediate_size=512, **size)
    resnet = hf.ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128], depths=[1, 1, 1])
    words = torch.randint(0, 1000, (1, 64))
    pixels = torch.randn(1, 3, 64, 64)
    yield "BERT", hf.BertModel(bert), {"input_ids": words}
    yield "GPT-2", hf.GPT2Model(gpt2), {"input_ids": words}
    yield "ViT", hf.ViTModel(vit), {"pixel_values": pixels}
    yield "ResNet", hf.ResNetModel(resnet), {"pixel_values": pixels}
    yield "Inception-like", inception_like(), {"input": pixels}
    yield "MLP of 24 modules", mlp(13, 64), {"input": torch.randn(8, 64)}


def branched() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield the networks with branches, with their inputs."""
    yield "Inception-like", inception_like(), {"input": torch.randn(1, 3, 64, 64)}
    yield "randomly wired", randomly_wired(), {"input": torch.randn(1, 3, 64, 64)}
    yield "mixture of experts", Mixture(), {"x": torch.randn(1, 256)}


# ---- contestants


def in_eager(model: nn.Module, inputs: dict[str, Tensor]) -> Run:
    return lambda: model(**inputs)


def by_torch(model: nn.Module, inputs: dict[str, Tensor]) -> Run:
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model))
    return lambda: compiled(**inputs)


def by_autosched(model: nn.Module, inputs: dict[str, Tensor], streams: int, fuse: bool) -> Run:
    machine = asc.Machine.local(gpus=0, cpu_streams=streams)
    compiled = asc.compile(copy.deepcopy(model), machine, fuse=fuse)
    return lambda: compiled(**inputs)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    forward: Callable[..., Tensor],
    update: Callable[[], object],
) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(x), y)
        loss.backward()
        update()
        return loss.detach()

    return step


def trainer(
    make: Callable[[], nn.Module],
    optimizer_of: Callable[..., torch.optim.Optimizer],
    batch: tuple[Tensor, Tensor],
    way: str,
) -> Run:
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    forward: Callable[..., Tensor] = model
    update: Callable[[], object] = optimizer.step
    if way.startswith("torch.compile"):
        torch._dynamo.reset()
        forward = torch.compile(model)
    if way.endswith("optimizer compiled"):
        update = torch.compile(optimizer.step)
    step = training_step(model, optimizer, batch, forward, update)
    if way.startswith("autosched"):
        machine = asc.Machine.local(gpus=0)
        step = asc.compile(step, machine, fuse=way == "autosched, fused")
    return lambda: step(*batch)


# ---- measuring


def first_calls(contestant: Contestant, records: bool) -> float:
    """Return the seconds of the first two calls, with an empty cache."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(contestant.threads)
    with fresh_cache(), torch.set_grad_enabled(records):
        begun = time.perf_counter()
        run = contestant.make()
        run()
        run()
        return time.perf_counter() - begun


def measured(
    contestants: list[Contestant], rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds of a call of each contestant, and the seconds of its first calls."""
    first: dict[str, float] = {}
    for each in contestants:
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning) as process:
            records = torch.is_grad_enabled()
            first[each.name] = process.submit(first_calls, each, records).result()
    ready: list[tuple[Contestant, Run]] = []
    for each in contestants:
        torch.set_num_threads(each.threads)
        ready.append((each, each.make()))
        ready[-1][1]()
    times: dict[str, list[float]] = {each.name: [] for each in contestants}
    for _ in range(rounds):
        for each, run in ready:
            torch.set_num_threads(each.threads)
            settled = time.perf_counter() + SETTLING
            while time.perf_counter() < settled:
                run()
            for _ in range(3):
                begun = time.perf_counter()
                run()
                times[each.name].append(time.perf_counter() - begun)
    return {name: statistics.median(found) for name, found in times.items()}, first


def row(
    label: str, seconds: dict[str, float], first: dict[str, float], rivals: list[str]
) -> list[str]:
    names = list(seconds)
    base = min(seconds[name] for name in rivals)
    return [
        label,
        *(f"{seconds[name] * 1e6:,.0f}" for name in names),
        f"{seconds['autosched, fused'] / base:.2f}",
        f"{first['autosched, fused'] / min(first[name] for name in rivals):.2f}",
    ]


def training(rounds: int, threads: int, most: int | None) -> str:
    ways = [
        "eager",
        "torch.compile",
        "torch.compile, optimizer compiled",
        "autosched",
        "autosched, fused",
    ]
    rows = []
    for kind, (make, batch_of) in islice(TRAINING.items(), most):
        for name, optimizer in OPTIMIZERS.items():
            batch = batch_of()
            contestants = [
                Contestant(way, threads, functools.partial(trainer, make, optimizer, batch, way))
                for way in ways
            ]
            seconds, first = measured(contestants, rounds)
            cells = row(f"{kind}, {name}", seconds, first, ["torch.compile"])
            ratio, alike = (
                f"{found['autosched, fused'] / found['torch.compile, optimizer compiled']:.2f}"
                for found in (seconds, first)
            )
            rows.append([*cells[:-1], ratio, cells[-1], alike])
            print(rows[-1], file=sys.stderr, flush=True)
    columns = ["fused / torch.compile", "fused / optimizer compiled"]
    columns += ["compile time", "compile time / optimizer compiled"]
    return (
        f"## Training steps, {threads} threads, us\n\n{table(['', *ways, *columns], rows)}\n\n"
        "Targets: at most 0.7 of torch.compile with an eager optimizer, 1.0 with a compiled "
        "optimizer, and 1.3 times the compile time of the former."
    )


def inference(
    cases: Iterator[tuple[str, nn.Module, dict[str, Tensor]]],
    streams: int,
    rounds: int,
    target: str,
) -> str:
    rows: list[list[str]] = []
    names: list[str] = []
    for label, model, inputs in cases:
        model.eval()
        make = functools.partial
        rivals = [
            Contestant(f"torch.compile, {threads} threads", threads, make(by_torch, model, inputs))
            for threads in ((1, 2) if streams == 2 else (2,))
        ]
        contestants = [
            Contestant("eager", 2, make(in_eager, model, inputs)),
            *rivals,
            Contestant("autosched", 2, make(by_autosched, model, inputs, streams, False)),
            Contestant("autosched, fused", 2, make(by_autosched, model, inputs, streams, True)),
        ]
        with torch.no_grad():
            seconds, first = measured(contestants, rounds)
        names = list(seconds)
        rows.append(row(label, seconds, first, [rival.name for rival in rivals]))
        print(rows[-1], file=sys.stderr, flush=True)
    head = ["", *names, "fused / best torch.compile", "compile time"]
    streams_text = f"{streams} stream" + "s" * (streams > 1)
    return f"## Inference on {streams_text}, us\n\n{table(head, rows)}\n\nTarget: {target}."


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=["training", "inference", "branches"])
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rounds, most = (8, 1) if chosen.quick else (30, None)
    threads = torch.get_num_threads()
    parts = {
        "training": lambda: training(rounds, threads, most),
        "inference": lambda: inference(islice(networks(), most), 1, rounds, "at most 1.02"),
        "branches": lambda: inference(islice(branched(), most), 2, rounds, "at most 0.8"),
    }
    for name in [chosen.only] if chosen.only else parts:
        title = f"Fused regions: {name}"
        publish(f"fused_{name}", title, [parts[name]()], chosen, ("torch", "transformers"))


if __name__ == "__main__":
    main()
