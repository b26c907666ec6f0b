"""Networks of the transformers library, tiny and without their weights, train as they do eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched import TorchBackend
from tests.serial import some

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="extra [hf]"),
]

MACHINE = asc.Machine.emulated(gpus=2)
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}


def made(network: str, config: str, **options: Any) -> nn.Module:
    """Return a network of the library, whose import takes seconds."""
    import transformers

    found: nn.Module = getattr(transformers, network)(getattr(transformers, config)(**options))
    return found


def text(labels: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    words = torch.randint(0, 31, (3, 7))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels(words)}


def pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 2, (2,))}


WORDS = {"vocab_size": 31, "max_position_embeddings": 16, **SMALL}
GPT2 = {"vocab_size": 31, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
IMAGES = {"image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1, **SMALL}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bert": (
        partial(made, "BertForSequenceClassification", "BertConfig", **WORDS),
        lambda: text(lambda words: torch.randint(0, 2, (len(words),))),
    ),
    "gpt2": (  # its head is its embedding
        partial(made, "GPT2LMHeadModel", "GPT2Config", bos_token_id=0, **GPT2),
        lambda: text(lambda words: words),
    ),
    "vit": (
        partial(made, "ViTForImageClassification", "ViTConfig", **IMAGES),
        lambda: pictures(8),
    ),
    "resnet": (
        partial(made, "ResNetForImageClassification", "ResNetConfig", **RESNET),
        lambda: pictures(32),
    ),
}


def assert_trains_as_eagerly(
    network: str, optimizer: Callable[[Any], Any], twin_of: Callable[..., Any]
) -> None:
    """Hold three steps of a twin to those of a model: losses, parameters, buffers and moments."""
    make, batch = NETWORKS[network]
    torch.manual_seed(0)
    models = [make()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optimizer(model.parameters()) for model in models]
    steps = [eager(models[0], optimizers[0]), twin_of(models[1], optimizers[1])]
    for number in range(3):
        given, losses = batch(), list[Tensor]()
        for step in steps:
            torch.manual_seed(number)
            losses.append(step(**given))
        assert torch.equal(*losses), number
        for name, tensor in models[0].state_dict().items():
            assert torch.equal(models[1].state_dict()[name], tensor), (number, name)
        moments = [optimizer.state_dict()["state"] for optimizer in optimizers]
        for i, held in moments[0].items():
            assert all(
                torch.equal(torch.as_tensor(moments[1][i][key]), torch.as_tensor(held[key]))
                for key in held
            )


def eager(model: nn.Module, optimizer: Any) -> Callable[..., Tensor]:
    def step(**given: Tensor) -> Tensor:
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.filterwarnings("error:torch.compile's")
@pytest.mark.parametrize("network", some(NETWORKS))
def test_they_train_under_torch_compile(network: str) -> None:
    backend = TorchBackend(MACHINE, policy="round_robin", backend="virtual")
    assert_trains_as_eagerly(
        network,
        torch.optim.AdamW,
        lambda model, optimizer: eager(torch.compile(model, backend=backend), optimizer),
    )
    assert {"forward", "backward"} <= {schedule.graph.name for schedule in backend.schedules()}


@pytest.mark.parametrize("network", some(NETWORKS, "gpt2"))
@pytest.mark.parametrize("optimizer", some([torch.optim.SGD, torch.optim.AdamW], torch.optim.AdamW))
def test_their_whole_steps_are_captured(network: str, optimizer: Any) -> None:
    def captured(model: nn.Module, optimizer: Any) -> Any:
        return asc.compile(
            eager(model, optimizer), MACHINE, policy="round_robin", backend="virtual"
        )

    assert_trains_as_eagerly(network, optimizer, captured)


@pytest.mark.parametrize("network", some(NETWORKS, "gpt2"))
def test_their_results_stay_of_their_kinds(network: str) -> None:
    make, batch = NETWORKS[network]
    model, inputs = make().eval(), batch()
    model.config.use_cache = False  # an object of theirs
    with torch.no_grad(), asc.compile(model, MACHINE, backend="virtual") as run:
        expected = model(**inputs)
        for _ in range(2):
            found = run(**inputs)
            assert type(found) is type(expected)
            assert torch.equal(found.loss, expected.loss)
            assert torch.equal(found["logits"], expected.logits)
