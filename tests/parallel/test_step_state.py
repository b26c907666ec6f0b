"""What a step looks up at each call."""

import torch
from torch import nn

from autosched.frontends.state import State
from autosched.parallel.plans import Key
from autosched.parallel.shared_state import parameters_of, state_tensors


def model_with_cycle():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[0].parent = model
    return model


def test_parameters_and_state_are_those_of_torch_each_once():
    model = model_with_cycle()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    moments = [item for held in optimizer.state.values() for item in held.values()]
    expected = [*model.parameters(), *model.buffers()]
    assert sorted(map(id, parameters_of(model))) == sorted(map(id, model.parameters()))
    found = [*map(id, state_tensors(model, optimizer))]
    assert sorted(found) == sorted(map(id, [*expected, *moments]))


def test_tensors_are_found_in_their_places():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.centre = torch.zeros(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    parameters = dict(model.named_parameters())
    state = State({"": model}, {"optimizer": optimizer}, parameters)
    places = {name: place for name, (place, _) in state.places().items()}
    found = state.tensors_at(places)
    assert {place[0] for place in places.values()} == {
        "parameter", "buffer", "attribute", "grad", "moment", "setting"
    }  # fmt: skip
    assert found.keys() == places.keys()
    assert all(found[name] is tensor for name, tensor in state.tensors().items())


def test_keys_are_equal_by_their_parts():
    assert Key((1, "a")) == Key((1, "a")) != Key((1, "b"))
    assert {Key((1, "a")): "found"}[Key((1, "a"))] == "found"
