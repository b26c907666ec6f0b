"""Compare fused regions with eager execution and with torch.compile on a CPU.

Training steps: one region, or few, for forward, backward and optimizer, compared with torch.compile
of the model with an eager optimizer, and with a compiled ``optimizer.step``. Inference on one
stream, and on two streams for networks with branches.

Before a case is measured, each contestant makes five steps, or one call, and its results are compared
with those of eager mode: losses, weights and buffers, or outputs. The tables have the largest
difference, relative to the largest element of its tensor; where fused results differ by more than
both 1e-3 and ten times what torch.compile's do, the script fails.

All contestants of a case take turns. Runs of a turn are measured after 30 ms of others, when the
threads of the contestant before have gone to sleep. First results are of new processes, from the
import's end to the end of the second call, since a training step is captured again when its optimizer
has state: cold with an empty cache of Inductor, and warm with that of the process before. With
``--first`` all rows have them. A run of 90 steps has all calls, with cold caches.
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
from typing import Any, NamedTuple

import torch
from _report import parser, publish, table
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional

import autosched as asc

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from networks import Branches, Conv, Wiring, chain, head

Run = Callable[[], object]

FUSED = "autosched, fused"

SETTLING = 0.03  # seconds of runs before those that are measured
STEPS = 5  # that are compared with eager ones


class Contestant(NamedTuple):
    """A way to run a case: the number of torch's threads, and what prepares its call.

    ``make`` returns the call, and the tensors that it changes, by name.
    """

    name: str
    threads: int
    make: Callable[[], tuple[Run, Callable[[], dict[str, Tensor]]]]


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


def normalized(model: nn.Module) -> nn.Module:
    """Return a network whose batch norms know the statistics of their inputs, as a trained one's.

    Otherwise signals vanish on the way, and all results are the last bias.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 64, 64))
    return model


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
    yield "Inception-like", normalized(inception_like()), {"input": pixels}
    yield "MLP of 24 modules", mlp(13, 64), {"input": torch.randn(8, 64)}


def branched() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield the networks with branches, with their inputs."""
    yield "Inception-like", normalized(inception_like()), {"input": torch.randn(1, 3, 64, 64)}
    yield "randomly wired", normalized(randomly_wired()), {"input": torch.randn(1, 3, 64, 64)}
    yield "mixture of experts", Mixture(), {"x": torch.randn(1, 256)}


# ---- contestants


def in_eager(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Run, Any]:
    return lambda: model(**inputs), dict


def by_torch(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Run, Any]:
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model))
    return lambda: compiled(**inputs), dict


def by_autosched(
    model: nn.Module, inputs: dict[str, Tensor], streams: int, fuse: bool, freeze: bool = False
) -> tuple[Run, Any]:
    machine = asc.Machine.local(gpus=0, cpu_streams=streams)
    own = copy.deepcopy(model)
    compiled = asc.compile(own, machine, fuse=asc.Frozen(own) if freeze else fuse)
    return lambda: compiled(**inputs), dict


def training_step(
    optimizer: torch.optim.Optimizer,
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
) -> tuple[Run, Callable[[], dict[str, Tensor]]]:
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
    step = training_step(optimizer, forward, update)
    if way.startswith("autosched"):
        machine = asc.Machine.local(gpus=0)
        step = asc.compile(step, machine, fuse=way == FUSED)
    return lambda: step(*batch), model.state_dict


# ---- measuring


def first_calls(contestant: Contestant, records: bool, steps: int) -> list[float]:
    """Return the seconds until each of the first calls has ended."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(contestant.threads)
    with torch.set_grad_enabled(records):
        begun = time.perf_counter()
        run, _ = contestant.make()
        return [(run(), time.perf_counter() - begun)[1] for _ in range(steps)]


def in_new_process(contestant: Contestant, steps: int = 2) -> list[float]:
    """Return what ``first_calls`` does in a process of its own."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning) as process:
        records = torch.is_grad_enabled()
        return process.submit(first_calls, contestant, records, steps).result()


def results(contestant: Contestant) -> tuple[Run, dict[str, Tensor]]:
    """Return the call of a contestant, and what it has computed in its first calls."""
    torch.set_num_threads(contestant.threads)
    run, state = contestant.make()
    made = [_tensors(run()) for _ in range(STEPS if torch.is_grad_enabled() else 1)]
    found = {f"{i}.{name}": item for i, each in enumerate(made) for name, item in each.items()}
    return run, {**found, **{name: item.clone() for name, item in state().items()}}


def _tensors(made: Any) -> dict[str, Tensor]:
    leaves = torch.utils._pytree.tree_leaves(dict(made) if hasattr(made, "items") else made)
    return {str(i): leaf.clone() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest element of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - item.double()).abs().max() / item.double().abs().max())
        for name, item in expected.items()
        if item.numel() and item.abs().max() > 0
    )


class Measured(NamedTuple):
    """Of each contestant, the median seconds of a call, of first calls, and its difference."""

    seconds: dict[str, float]
    cold: dict[str, float]
    warm: dict[str, float]
    difference: dict[str, float]


def measured(contestants: list[Contestant], rounds: int, first: bool) -> Measured:
    """Compare all contestants with the first one, then measure them; ``first``: also first calls."""
    cold: dict[str, float] = {}
    warm: dict[str, float] = {}
    for each in contestants:
        if first and ("torch" in each.name or each.name == FUSED):
            with fresh_cache():
                cold[each.name] = in_new_process(each)[-1]
                warm[each.name] = in_new_process(each)[-1]
    ready: list[tuple[Contestant, Run]] = []
    made = {}
    for each in contestants:
        run, made[each.name] = results(each)
        ready.append((each, run))
    expected = made[contestants[0].name]
    deviations = {name: difference(found, expected) for name, found in made.items()}
    allowed = max(1e-3, 10 * max(d for name, d in deviations.items() if "torch" in name))
    if any(found > allowed for found in deviations.values()):
        raise AssertionError(f"results differ from eager ones: {deviations}")
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
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return Measured(seconds, cold, warm, deviations)


def row(label: str, found: Measured, rivals: list[str]) -> list[str]:
    """Return a row: seconds of all, the ratio, differences, and seconds of first calls."""
    best = min(rivals, key=found.seconds.__getitem__)
    cells = [
        label,
        *(f"{taken * 1e6:,.0f}" for taken in found.seconds.values()),
        f"{found.seconds[FUSED] / found.seconds[best]:.2f}",
        *(f"{found.difference[name]:.0e}" for name in (best, FUSED)),
    ]
    for kind in filter(None, (found.cold, found.warm)):
        least = min(kind[name] for name in rivals)
        cells += [f"{least:.1f}", f"{kind[FUSED]:.1f}", f"{kind[FUSED] / least:.2f}"]
    print(cells, file=sys.stderr, flush=True)
    return cells


def columns(first: bool) -> list[str]:
    """Return the heads of the columns after the seconds."""
    heads = ["fused / torch.compile", "difference from eager: torch.compile", "fused"]
    if first:
        heads += ["first results, s: torch.compile", "fused", "ratio"]
        heads += ["warm: torch.compile", "fused", "ratio"]
    return heads


def training(rounds: int, threads: int, most: int | None, first: bool) -> str:
    ways = [
        "eager",
        "torch.compile",
        "torch.compile, optimizer compiled",
        "autosched",
        FUSED,
    ]
    rows = []
    for kind, (make, batch_of) in islice(TRAINING.items(), most):
        for name, optimizer in OPTIMIZERS.items():
            batch = batch_of()
            contestants = [
                Contestant(way, threads, functools.partial(trainer, make, optimizer, batch, way))
                for way in ways
            ]
            rows.append(
                row(f"{kind}, {name}", measured(contestants, rounds, first), ["torch.compile"])
            )
    return (
        f"## Training steps, {threads} threads, us\n\n{table(['', *ways, *columns(first)], rows)}\n\n"
        "Targets: at most 0.85 of torch.compile with an eager optimizer, and 1.3 times its time to "
        "the first results."
    )


def run_of(steps: int, threads: int) -> str:
    """Compare whole training runs of the conv net, and the time to the first results."""
    make, batch_of = TRAINING["conv net"]
    batch = batch_of()
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        taken = {}
        warm = {}
        for way in ("eager", "torch.compile", "autosched", FUSED):
            prepare = functools.partial(trainer, make, optimizer, batch, way)
            contestant = Contestant(way, threads, prepare)
            with fresh_cache():
                taken[way] = in_new_process(contestant, steps)
                warm[way] = in_new_process(contestant)[-1]
        # A step takes the mean of the second half; compared runs are in the first one.
        half = steps // 2
        step = {way: (ends[-1] - ends[half]) / (steps - 1 - half) for way, ends in taken.items()}
        later = taken[FUSED][half] - taken["autosched"][half]
        gain = step["autosched"] - step[FUSED]
        pays = f"{half + later / gain:,.0f}" if gain > 0 else "never"
        rows += [
            [f"{name}, first results, cold", *(f"{ends[1]:.1f}" for ends in taken.values()), ""],
            [f"{name}, first results, warm", *(f"{seconds:.1f}" for seconds in warm.values()), ""],
            [f"{name}, {steps} steps, cold", *(f"{ends[-1]:.1f}" for ends in taken.values()), pays],
        ]
        print(*rows[-3:], sep="\n", file=sys.stderr, flush=True)
    names = ["", "eager", "torch.compile", "autosched", FUSED, "steps from which fusing pays"]
    return f"## Training the conv net, s\n\n{table(names, rows)}"


def inference(
    cases: Iterator[tuple[str, nn.Module, dict[str, Tensor]]],
    streams: int,
    rounds: int,
    first: bool,
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
            Contestant(FUSED, 2, make(by_autosched, model, inputs, streams, True)),
        ]
        with torch.no_grad():
            found = measured(contestants, rounds, first)
        names = list(found.seconds)
        rows.append(row(label, found, [rival.name for rival in rivals]))
    streams_text = f"{streams} stream" + "s" * (streams > 1)
    heads = ["", *names, *columns(first)]
    return f"## Inference on {streams_text}, us\n\n{table(heads, rows)}\n\nTarget: {target}."


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=["training", "run", "inference", "branches"])
    options.add_argument("--first", action="store_true", help="measure first calls of all rows")
    chosen = options.parse_args()
    first = chosen.first
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rounds, most = (8, 1) if chosen.quick else (30, None)
    threads = torch.get_num_threads()
    parts = {
        "training": lambda: training(rounds, threads, most, first),
        "run": lambda: run_of(10 if chosen.quick else 90, threads),
        "inference": lambda: inference(islice(networks(), most), 1, rounds, first, "at most 1.05"),
        "branches": lambda: inference(islice(branched(), most), 2, rounds, first, "at most 0.85"),
    }
    for name in [chosen.only] if chosen.only else parts:
        title = f"Fused regions: {name}"
        publish(f"fused_{name}", title, [parts[name]()], chosen, ("torch", "transformers"))


if __name__ == "__main__":
    main()
