"""Train a two-layer perceptron on one CPU and two GPUs.

This is the example of Dive into Deep Learning, "Automatic Parallelism": each GPU runs forward and
backward on its half of the batch, the CPU sums the gradients and updates the weights, and the new
weights go back to both GPUs. The data are the 1,797 handwritten digits of 8x8 pixels that
scikit-learn bundles. Only the public API is used.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import getitem
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import autosched as asc

BATCH = 128
RATE = 0.5
HIDDEN = 256
GPUS = ("cuda:0", "cuda:1")


class Digits(NamedTuple):
    """Images as rows of 64 numbers from 0 to 1, with their digits, for training and test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits() -> Digits:
    """Return the digits; the same quarter of them is always the test set."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        needed = "autosched demo needs scikit-learn for its data"
        raise SystemExit(f"{needed}: pip install 'autosched[demo]'") from None
    digits = bundled()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    return Digits(x[450:], y[450:], x[:450], y[:450])


def machine_of_two() -> tuple[asc.Machine, str]:
    """Return a machine with two GPUs, and its kind in words: real, logical, or emulated."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count >= 2:
        return asc.Machine.local(gpus=2), "two real GPUs"
    if count == 1:
        return asc.Machine.local(gpus=2), "two logical devices on one real GPU"
    slow = 200
    kind = f"two emulated GPUs, {slow} times slower than real ones, so that this CPU can keep up"
    return asc.Machine.emulated(gpus=2, link="pcie4").slower(slow), kind


def mlp_step(gpus: Sequence[str] = GPUS, batch: int = BATCH) -> asc.Graph:
    """Return a training step as a graph: the operators on each GPU, the update on the CPU."""
    graph = asc.Graph("two-layer MLP")
    x, y, w1, w2 = graph.inputs("x", "y", "w1", "w2")
    weights = {"w1": w1, "w2": w2}
    gradients: dict[str, list[asc.Value]] = {"w1": [], "w2": []}
    losses = []
    replicas = []
    for i, gpu in enumerate(gpus):
        half = slice(i * batch // 2, (i + 1) * batch // 2)
        rows = graph.add(getitem, x, half, name=f"x.{i}")
        labels = graph.add(getitem, y, half, name=f"y.{i}")
        with graph.on(gpu):
            v1, v2 = graph.inputs(f"w1.{i}", f"w2.{i}")
            h = graph.add(torch.mm, rows, v1, name=f"h.{i}")
            a = graph.add(torch.relu, h, name=f"a.{i}")
            scores = graph.add(torch.mm, a, v2, name=f"s.{i}")
            losses.append(
                graph.add(torch.nn.functional.cross_entropy, scores, labels, name=f"loss.{i}")
            )
            d_scores = graph.add(cross_entropy_gradient, scores, labels, name=f"ds.{i}")
            gradients["w2"].append(graph.add(weight_gradient, a, d_scores, name=f"dw2.{i}"))
            d_a = graph.add(input_gradient, d_scores, v2, name=f"da.{i}")
            d_h = graph.add(relu_gradient, d_a, h, name=f"dh.{i}")
            gradients["w1"].append(graph.add(weight_gradient, rows, d_h, name=f"dw1.{i}"))
        replicas.append({"w1": v1, "w2": v2})
    for name in ("w2", "w1"):  # the last layer's gradient is computed first
        weight = weights[name]
        with graph.on("cpu"):
            total = graph.add(torch.add, *gradients[name], name=f"d{name}")
            graph.add(sgd_, weight, total, RATE / 2, name=f"sgd_{name}", writes=weight, outputs=())
        for i, gpu in enumerate(gpus):
            graph.add(Tensor.copy_, replicas[i][name], weight, name=f"new_{name}.{i}", on=gpu)
    graph.output(loss=graph.add(mean, *losses, name="loss", on="cpu"))
    return graph


def weight_gradient(before: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of ``before @ weight`` with respect to the weight."""
    return before.T @ gradient


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient with respect to the input of the product with the weight."""
    return gradient @ weight.T


def cross_entropy_gradient(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean cross entropy with respect to the scores (rows, classes)."""
    hot = torch.nn.functional.one_hot(labels, scores.shape[1])
    return (torch.softmax(scores, 1) - hot) / len(labels)


def relu_gradient(gradient: Tensor, before: Tensor) -> Tensor:
    """Return the gradient with respect to the input of the ReLU."""
    return gradient * (before > 0)


def sgd_(weight: Tensor, gradient: Tensor, rate: float) -> None:
    """Update a weight in place."""
    weight.sub_(gradient, alpha=rate)


def mean(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of two losses."""
    return (a + b) / 2


def initial_weights(gpus: Sequence[str], machine: asc.Machine) -> dict[str, Tensor]:
    """Return fresh weights, the same each time: the CPU's, and a replica on each GPU."""
    generator = torch.Generator().manual_seed(1)
    w1 = torch.randn(64, HIDDEN, generator=generator) / 8
    w2 = torch.randn(HIDDEN, 10, generator=generator) / 16
    made = {"w1": w1, "w2": w2}
    for i, gpu in enumerate(gpus):
        where = "cpu" if machine.imagined else machine.device(gpu).physical or gpu
        made |= {f"w1.{i}": w1.clone().to(where), f"w2.{i}": w2.clone().to(where)}
    return made


def mlp_example() -> tuple[asc.Graph, dict[str, Tensor]]:
    """Return a training step, and inputs for it: random images and fresh weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(BATCH, 64, generator=generator)
    y = torch.randint(10, (BATCH,), generator=generator)
    return mlp_step(), {"x": x, "y": y, **initial_weights(GPUS, asc.Machine.emulated(gpus=2))}


def averaged_example() -> tuple[asc.Graph, dict[str, Tensor]]:
    """Return a prediction averaged over eight shifts of a batch, and inputs for it.

    No task is bound to a device, so policies, links and numbers of GPUs make a difference, which
    ``autosched compare`` shows.
    """
    graph = asc.Graph("prediction averaged over eight shifts")
    x, w1, w2, w3 = graph.inputs("x", "w1", "w2", "w3")
    results = []
    for shift in range(8):
        h = graph.add(torch.roll, x, shift, 1, name=f"shift.{shift}") if shift else x
        for layer, w in enumerate((w1, w2, w3), 1):
            h = graph.add(torch.mm, h, w, name=f"mm{layer}.{shift}")
        results.append(h)
    while len(results) > 1:
        results = [a + b for a, b in zip(results[::2], results[1::2], strict=True)]
    graph.output(mean=results[0] / 8)
    generator = torch.Generator().manual_seed(4)
    return graph, {name: torch.rand(1024, 1024, generator=generator) for name in graph.input_names}


def main(epochs: int = 12, folder: Path = Path()) -> int:
    """Train, compare with the serial run, and draw; return the exit code."""
    # The products are small; intra-op threads would compete with those of the streams.
    torch.set_num_threads(1)
    data = load_digits()
    machine, kind = machine_of_two()
    gpus = machine.accelerators
    graph = mlp_step(gpus)
    state = initial_weights(gpus, machine)
    reference = initial_weights(gpus, machine)
    examples = {"x": data.x[:BATCH], "y": data.y[:BATCH], **state}
    print(f"machine: {kind}\n{_indented(str(machine))}\n")
    with asc.schedule(graph, machine, examples=examples) as schedule:
        head = "\n".join(str(schedule).splitlines()[:20])
        print(f"{schedule!r}\nits program begins:\n{_indented(head)}\n    ...\n")
        _train(schedule, data, state, reference, epochs)
        different = [name for name in state if not torch.equal(state[name], reference[name])]
        steps = epochs * (len(data.y) // BATCH)
        count = sum(tensor.numel() for tensor in state.values())
        how = f"equal to serial: bit for bit ({count:,} weights after {steps} steps)"
        if different:
            how = f"NOT equal to serial after {steps} steps: {', '.join(different)}"
        print(f"\n{how}")
        _report(schedule, examples, folder, kind)
    return 0 if not different and _accuracy(state, data) > 0.95 else 1


def _batches(data: Digits, epochs: int) -> list[list[dict[str, Tensor]]]:
    """Return the shuffled batches of each epoch, the same each time."""
    generator = torch.Generator().manual_seed(2)
    orders = [torch.randperm(len(data.y), generator=generator) for _ in range(epochs)]
    starts = range(0, len(data.y) - BATCH + 1, BATCH)
    return [
        [{"x": data.x[o[s : s + BATCH]], "y": data.y[o[s : s + BATCH]]} for s in starts]
        for o in orders
    ]


def _train(
    schedule: asc.Schedule,
    data: Digits,
    state: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    epochs: int,
) -> None:
    """Train, and train the reference task by task."""
    for epoch, batches in enumerate(_batches(data, epochs), 1):
        losses = [float(schedule(**batch, **state)["loss"]) for batch in batches]
        for batch in batches:
            schedule.run_serial(**batch, **reference)
        loss = f"loss {statistics.mean(losses):.4f}"
        accuracy = f"test accuracy {_accuracy(state, data):.4f}"
        print(f"epoch {epoch:2}: {loss}, {accuracy}", flush=True)


def _accuracy(state: Mapping[str, Tensor], data: Digits) -> float:
    guess = (torch.relu(data.test_x @ state["w1"]) @ state["w2"]).argmax(1)
    return float((guess == data.test_y).float().mean())


def _report(
    schedule: asc.Schedule, examples: Mapping[str, Tensor], folder: Path, kind: str
) -> None:
    """Print predicted and measured times of one step, and write the pictures."""
    inputs = {name: tensor.clone() for name, tensor in examples.items()}
    measured = schedule.profile(repeat=9, **inputs)
    predicted = schedule.simulate()
    print("\none step")
    for name, seconds, note in (
        ("predicted makespan", predicted.makespan, ""),
        ("measured makespan", measured.makespan, "median of 9 steps"),
        ("serial", schedule.serial_seconds, "one task or copy at a time, as predicted"),
        ("lower bound", schedule.lower_bound, f"of any schedule; the gap is {schedule.gap:.0%}"),
    ):
        print(f"    {name:<20}{seconds * 1e3:9.3f} ms  {note}")
    hidden = f"{measured.overlap().copies_hidden:9.0%}     of their time, behind compute"
    print(f"    {'copies hidden':<20}{hidden}; predicted {predicted.overlap().copies_hidden:.0%}")
    gantt, dag, page = (folder / name for name in ("mlp.svg", "mlp_graph.svg", "mlp.html"))
    title = f"One training step of a two-layer MLP on {kind.partition(', so')[0]}"
    schedule.draw(gantt, measured, title=title)
    schedule.graph.draw(dag, schedule.placement.device)
    schedule.report(page, measured, title=title)
    print(f"\nwrote {gantt} (the schedule), {dag} (the graph)", end=" ")
    print(f"and {page} (all of it, for a browser)")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
