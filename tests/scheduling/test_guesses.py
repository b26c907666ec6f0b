"""What is predicted from guesses says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autosched as asc
from autosched.viz import gantt_svg, gantt_text

MACHINE = asc.Machine.emulated(gpus=1)


def network(seconds: float | None = None) -> asc.Graph:
    graph = asc.Graph("net")
    x, w = graph.inputs("x", "w")
    hidden = graph.add(torch.matmul, x, w, seconds=seconds)
    graph.output(y=hidden.T.relu())
    return graph


BOTH = {"matmul": "both", "relu": "both"}


@pytest.mark.parametrize(
    ("graph", "options", "guess"),
    [
        (network(), {}, "10 us guessed for each task"),
        (network(1e-3), {}, "10 us guessed for 1 of 2 tasks"),
        (network(1e-3), {"costs": asc.Costs.table({"relu": 1e-3})}, ""),
        (network(), {"costs": asc.Costs(default_seconds=1.0)}, ""),
        (network(), {"examples": {"x": torch.ones(2, 2), "w": torch.ones(2, 2)}}, ""),
        (asc.merge(network(), BOTH), {}, "10 us guessed for each task"),
        (asc.merge(network(), BOTH), {"costs": asc.Costs.table({"matmul": 1.0, "relu": 1.0})}, ""),
    ],
)
def test_a_prediction_says_for_what_it_guesses(graph: Any, options: Any, guess: str) -> None:
    schedule = asc.schedule(graph, MACHINE, **options)
    compared = asc.compare(graph, MACHINE, ["single"], **options)
    explanation = str(schedule.explain())
    texts = [repr(schedule), gantt_text(schedule.simulate()), str(compared)]
    texts += [repr(compared), compared._repr_html_(), compared.svg(), schedule.page()]
    texts += [gantt_svg(schedule.simulate(runs=2)), explanation]
    for text in texts:
        assert (guess in text) if guess else ("guessed" not in text)
    if guess:
        assert f"{guess}; a copy of what has no known size carries nothing" in " ".join(
            explanation.split()
        )
        assert f"s predicted, with {guess}>" in repr(schedule)
    assert str(compared).splitlines()[0] == f"net: predicted{f', with {guess}' if guess else ''}"
