"""Small networks of the kinds that people train, each with batches for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class Block(nn.Module):
    """Two convolutions with batch norm, and a way past them."""

    def __init__(self, inside: int, outside: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        past = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )
        self.past = nn.Identity() if inside == outside and stride == 1 else past

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(self.norm2(self.conv2(y)) + self.past(x), inplace=True)


class Bottleneck(nn.Module):
    """Three convolutions with batch norm, the middle one a quarter as deep, and a way past them."""

    def __init__(self, inside: int, outside: int, stride: int = 1):
        super().__init__()
        inner = outside // 4
        self.conv1, self.norm1 = nn.Conv2d(inside, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.norm2 = (
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
        )
        self.conv3, self.norm3 = nn.Conv2d(inner, outside, 1, bias=False), nn.BatchNorm2d(outside)
        past = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )
        self.past = nn.Identity() if inside == outside and stride == 1 else past

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = functional.relu(self.norm2(self.conv2(y)), inplace=True)
        return functional.relu(self.norm3(self.conv3(y)) + self.past(x), inplace=True)


class ResNet(nn.Module):
    """Residual blocks in stages, each half as wide and twice as deep."""

    def __init__(
        self, blocks: tuple[int, ...] = (1, 2), width: int = 4, block: type[nn.Module] = Block
    ):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        layers, inside = list[nn.Module](), width
        for stage, count in enumerate(blocks):
            outside = (width << stage) * (4 if block is Bottleneck else 1)
            for number in range(count):
                layers.append(block(inside, outside, 2 if stage and not number else 1))
                inside = outside
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inside, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Tied(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(x)).mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = functional.relu(self.down(x))
        low = functional.relu(self.bottom(functional.max_pool2d(high, 2)))
        return self.head(torch.cat([high, self.up(low)], 1))


class Wired(nn.Module):
    """Layers that each read two random ones before them; some are used twice, some never."""

    def __init__(self, seed: int):
        super().__init__()
        source = random.Random(seed)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.wires = [
            (source.randrange(k + 1), source.randrange(k + 1), source.randrange(5))
            for k in range(7)
        ]
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for a, b, layer in self.wires:
            found.append(torch.tanh(self.layers[layer](found[a]) + found[b]))
        return self.head(found[-1] + found[-3])


def vectors(width: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(6, width), torch.randint(0, 4, (6,)))


def pictures() -> Batch:
    return torch.randn(3, 3, 12, 12), torch.randint(0, 4, (3,))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 4)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3), nn.Sigmoid(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24, 8), nn.Sigmoid(), nn.Linear(8, 4),
    )  # fmt: skip


KINDS = {
    "mlp": Kind(mlp, vectors(8)),
    "lenet": Kind(lenet, pictures),
    "resnet": Kind(ResNet, pictures),
    "recurrent": Kind(Recurrent, lambda: (torch.randn(3, 5, 5), torch.randint(0, 4, (3,)))),
    "transformer": Kind(
        Transformer, lambda: (torch.randint(0, 11, (3, 5)), torch.randint(0, 4, (3,)))
    ),
    "unet": Kind(UNet, lambda: (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8))),
    **{f"wired{seed}": Kind(lambda seed=seed: Wired(seed), vectors(6)) for seed in range(5)},
}

# One of each kind of network: other wires are of the same kind.
DISTINCT = [kind for kind in KINDS if not kind.startswith("wired")] + ["wired0"]

# Of true depth, narrow.
DEEP = {
    "resnet18": Kind(lambda: ResNet((2, 2, 2, 2)), pictures),
    "resnet50": Kind(lambda: ResNet((3, 4, 6, 3), block=Bottleneck), pictures),
}
