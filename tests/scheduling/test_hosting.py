"""Hosting: which tasks run on the host unless someone says otherwise."""

import pytest
import torch

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=2)


def parse(words):
    return torch.tensor([float(word) for word in words])


def made():
    return torch.ones(2)


def where(graph, **options):
    return asc.schedule(graph, MACHINE, **options).placement.device


@pytest.mark.parametrize("policy", ["round_robin", "heft", "auto"])
def test_what_reads_no_tensor_runs_on_the_host(policy):
    graph = asc.Graph()
    words, x = graph.inputs("words", "x")
    parsed = graph.add(parse, words)
    known = graph.add(parse, ["1", "2"], name="known")
    both = graph.add(lambda words, x: x * len(words), words, x, name="both", on="cuda:1")
    graph.output(y=parsed @ x + graph.add(made) * known + both)
    examples = {"words": ["1", "2"], "x": torch.ones(2)}
    devices = where(graph, policy=policy, examples=examples)
    assert {devices[name] for name in ("parse", "known", "made")} == {"cpu"}
    assert devices["both"] == "cuda:1"
    with asc.schedule(graph, MACHINE, policy=policy, examples=examples, backend="host") as schedule:
        assert schedule(**examples)["y"].tolist() == graph.run_serial(**examples)["y"].tolist()


def test_whoever_says_something_about_devices_is_heard():
    graph = asc.Graph()
    graph.add(parse, ["1"], name="pinned", on="cuda:0")
    graph.add(parse, ["1"], name="placed")
    graph.add(parse, ["1"], name="planned", seconds={"cuda:1": 1.0})
    graph.add(torch.ones, 2, device=asc.Here("cpu"), name="here", seconds={"cuda:0": 1.0})
    graph.output(graph.add(parse, ["1"], name="free"))
    devices = where(graph, place={"placed": "cuda:1"})
    assert devices == {
        "pinned": "cuda:0",
        "placed": "cuda:1",
        "planned": "cuda:1",
        "here": "cuda:0",
        "free": "cpu",
    }


def test_an_input_of_which_nothing_is_known_counts_as_a_tensor():
    graph = asc.Graph()
    graph.output(y=graph.add(parse, graph.input("words"), seconds=None))
    assert asc.schedule(graph, MACHINE, policy="round_robin").graph.task("parse").device is None


def test_a_policy_of_ones_own_places_as_it_likes():
    graph = asc.Graph()
    graph.output(graph.add(made))
    devices = where(graph, policy=lambda *_: asc.Placement({"made": "cuda:1"}, ("made",)))
    assert devices == {"made": "cuda:1"}
