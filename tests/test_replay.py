"""Runs that are recorded and replayed: they leave what ordinary runs leave, on played GPUs, and on real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.backends.replay import Replay
from autosched.placement import home
from autosched.testing.scattering import scattered
from autosched.testing.strategies import graphs, inputs_for, noisy
from tests.fake_gpu import playing


def noisy_there(a):
    return a * 0.5 + torch.rand_like(a) * 0.5


def there(machine, graph, inputs):
    """Move inputs to where they must live."""
    device = {name: machine.device(home(graph, machine, graph.value(name))) for name in inputs}
    return {name: tensor.to(device[name].physical or "cpu") for name, tensor in inputs.items()}


def equals_serial(draw, machine):
    """Run a drawn graph again and again, on inputs that change, and compare with the serial run."""
    graph = draw(graphs(machine.names)).pinned()
    graph.tasks[:] = [replace(task, fn=noisy_there) if task.fn is noisy else task for task in graph.tasks]
    kept = draw(st.booleans())
    with asc.schedule(graph, machine, policy=scattered(draw(st.integers(0, 99))), replay=True) as schedule:
        given, earlier = there(machine, schedule.graph, inputs_for(graph)), []
        for number in range(5):
            fresh = {
                name: tensor + number for name, tensor in there(machine, schedule.graph, inputs_for(graph)).items()
            }
            for name, tensor in fresh.items():
                given[name] = given[name].copy_(tensor) if kept else tensor
            expected_inputs = {name: tensor.clone() for name, tensor in given.items()}
            torch.manual_seed(3)
            expected = schedule.run_serial(**expected_inputs)
            torch.manual_seed(3)
            outputs = schedule(**given)
            earlier.append((outputs, {label: item.clone() for label, item in outputs.items()}))
            for label, item in expected.items():
                assert torch.equal(outputs[label], item), (number, label, kept, outputs[label].tolist(), item.tolist())
            for name in given:
                assert torch.equal(given[name], expected_inputs[name]), (
                    number,
                    name,
                    kept,
                    given[name].tolist(),
                    expected_inputs[name].tolist(),
                )
        assert schedule.not_replayed in (None, "nothing of it runs on an accelerator")
        return earlier


@settings(max_examples=25)
@given(data=st.data())
def test_replays_on_played_gpus_leave_what_the_serial_run_leaves(data):
    with playing(gpus=data.draw(st.sampled_from([1, 2])), seed=data.draw(st.integers(0, 99))):
        machine = asc.Machine.local(gpus=2)
        streams = data.draw(st.integers(1, 3))
        devices = [replace(device, streams=streams) for device in machine.devices]
        equals_serial(data.draw, replace(machine, devices=devices, links=machine.links))
