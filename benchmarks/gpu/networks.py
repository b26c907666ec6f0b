"""Networks whose branches may run side by side: those that papers on streams measure, for inference.

Inception-v3 and GoogLeNet (with batch norms) as torchvision has them, layer for layer, without the heads that only
training needs; cells wired like NASNet-A's; and random wirings (Xie, Kirillov, Girshick, He, "Exploring Randomly Wired
Neural Networks for Image Recognition", ICCV 2019). Weights are random: only time matters here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn import functional

Size = int | tuple[int, int]


class Conv(nn.Module):
    """A convolution without bias, a batch norm and a ReLU."""

    def __init__(
        self,
        inside: int,
        outside: int,
        size: Size = 1,
        stride: int = 1,
        padding: Size | None = None,
    ):
        super().__init__()
        around = (
            (size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2))
            if padding is None
            else padding
        )
        self.conv = nn.Conv2d(inside, outside, size, stride, around, bias=False)
        self.norm = nn.BatchNorm2d(outside, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, outside, ...)."""
        return functional.relu(self.norm(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """What several branches make of one input, joined by channels."""

    def __init__(self, *branches: nn.Module):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels of all branches."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def head(channels: int, classes: int = 1000) -> nn.Sequential:
    return chain(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(channels, classes))


def average() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1)


# ---- GoogLeNet: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015


def googlenet() -> nn.Module:
    """Return GoogLeNet for images of 224x224."""

    def block(
        inside: int, one: int, before3: int, three: int, before5: int, five: int, pooled: int
    ) -> nn.Module:
        return Branches(
            Conv(inside, one),
            chain(Conv(inside, before3), Conv(before3, three, 3)),
            chain(
                Conv(inside, before5), Conv(before5, five, 3)
            ),  # 3 wide in torchvision too, not 5
            chain(nn.MaxPool2d(3, 1, 1, ceil_mode=True), Conv(inside, pooled)),
        )

    def half() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return chain(
        Conv(3, 64, 7, 2), half(), Conv(64, 64), Conv(64, 192, 3), half(),
        block(192, 64, 96, 128, 16, 32, 32), block(256, 128, 128, 192, 32, 96, 64), half(),
        block(480, 192, 96, 208, 16, 48, 64), block(512, 160, 112, 224, 24, 64, 64),
        block(512, 128, 128, 256, 24, 64, 64), block(512, 112, 144, 288, 32, 64, 64),
        block(528, 256, 160, 320, 32, 128, 128), nn.MaxPool2d(2, 2, ceil_mode=True),
        block(832, 256, 160, 320, 32, 128, 128), block(832, 384, 192, 384, 48, 128, 128), head(1024),
    )  # fmt: skip


# ---- Inception-v3: Szegedy et al., "Rethinking the Inception Architecture", CVPR 2016


def inception_v3() -> nn.Module:
    """Return Inception-v3 for images of 299x299."""

    def narrow(inside: int, pooled: int) -> nn.Module:
        return Branches(
            Conv(inside, 64),
            chain(Conv(inside, 48), Conv(48, 64, 5)),
            chain(Conv(inside, 64), Conv(64, 96, 3), Conv(96, 96, 3)),
            chain(average(), Conv(inside, pooled)),
        )

    def sevens(c: int) -> nn.Module:
        across, down = (1, 7), (7, 1)
        return Branches(
            Conv(768, 192),
            chain(Conv(768, c), Conv(c, c, across), Conv(c, 192, down)),
            chain(
                Conv(768, c),
                Conv(c, c, down),
                Conv(c, c, across),
                Conv(c, c, down),
                Conv(c, 192, across),
            ),
            chain(average(), Conv(768, 192)),
        )

    def wide(inside: int) -> nn.Module:
        def fork() -> nn.Module:
            return Branches(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))

        return Branches(
            Conv(inside, 320),
            chain(Conv(inside, 384), fork()),
            chain(Conv(inside, 448), Conv(448, 384, 3), fork()),
            chain(average(), Conv(inside, 192)),
        )

    return chain(
        Conv(3, 32, 3, 2, 0), Conv(32, 32, 3, 1, 0), Conv(32, 64, 3), nn.MaxPool2d(3, 2),
        Conv(64, 80), Conv(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2),
        narrow(192, 32), narrow(256, 64), narrow(288, 64),
        Branches(
            Conv(288, 384, 3, 2, 0), chain(Conv(288, 64), Conv(64, 96, 3), Conv(96, 96, 3, 2, 0)), nn.MaxPool2d(3, 2)
        ),
        sevens(128), sevens(160), sevens(160), sevens(192),
        Branches(
            chain(Conv(768, 192), Conv(192, 320, 3, 2, 0)),
            chain(Conv(768, 192), Conv(192, 192, (1, 7)), Conv(192, 192, (7, 1)), Conv(192, 192, 3, 2, 0)),
            nn.MaxPool2d(3, 2),
        ),
        wide(1280), wide(2048), head(2048),
    )  # fmt: skip


# ---- cells like those of NASNet-A: Zoph, Vasudevan, Shlens, Le, "Learning Transferable Architectures", CVPR 2018


class Separable(nn.Module):
    """A ReLU and a depthwise separable convolution with a batch norm, twice, as NASNet has them."""

    def __init__(self, channels: int, size: int, stride: int = 1):
        super().__init__()
        self.layers = chain(*self._once(channels, size, stride), *self._once(channels, size, 1))

    @staticmethod
    def _once(channels: int, size: int, stride: int) -> Sequence[nn.Module]:
        deep = nn.Conv2d(channels, channels, size, stride, size // 2, groups=channels, bias=False)
        return (
            nn.ReLU(),
            deep,
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return features of as many channels."""
        return self.layers(x)


def _operation(kind: str, channels: int, stride: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind in ("avg", "max"):
        return (nn.AvgPool2d if kind == "avg" else nn.MaxPool2d)(3, stride, 1)
    return Separable(channels, int(kind), stride)


# Each line: an operation on one state, another on another; their sum is the next state. 0 is what the cell before made,
# 1 what the one before that made. Sums that no line reads are joined.
NORMAL = (
    ("5", 0, "3", 1),
    ("5", 1, "3", 1),
    ("avg", 0, "none", 1),
    ("avg", 1, "avg", 1),
    ("3", 0, "none", 0),
)
REDUCTION = (
    ("5", 0, "7", 1),
    ("max", 0, "7", 1),
    ("avg", 0, "5", 1),
    ("avg", 2, "none", 3),
    ("3", 2, "max", 0),
)


class Cell(nn.Module):
    """Five sums of two operations each, in a small graph of their own."""

    def __init__(self, before: int, last: int, channels: int, stride: int, further: bool):
        super().__init__()
        self.wires = NORMAL if stride == 1 else REDUCTION
        self.first = chain(
            nn.ReLU(), nn.Conv2d(last, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )
        shrink = (
            2 if further else 1
        )  # the cell before was a reduction, and the one before that was not
        self.second = chain(
            nn.ReLU(), nn.Conv2d(before, channels, 1, shrink, bias=False), nn.BatchNorm2d(channels)
        )
        self.operations = nn.ModuleList(
            _operation(kind, channels, stride if source < 2 else 1)
            for a, i, b, j in self.wires
            for kind, source in ((a, i), (b, j))
        )
        read = {source for _, i, _, j in self.wires for source in (i, j)}
        self.free = [k + 2 for k in range(len(self.wires)) if k + 2 not in read]
        self.channels = channels * len(self.free)

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        """Return the sums that are left, joined."""
        states = [self.first(last), self.second(before)]
        operations = iter(self.operations)
        for _, i, _, j in self.wires:
            states.append(next(operations)(states[i]) + next(operations)(states[j]))
        return torch.cat([states[k] for k in self.free], 1)


class NasNetLike(nn.Module):
    """Stacks of normal cells with a reduction between them."""

    def __init__(self, width: int = 44, stacks: int = 3, cells: int = 4):
        super().__init__()
        self.stem = chain(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32))
        made, before, last, further = list[nn.Module](), 32, 32, False
        for stack in range(stacks):
            for stride in ([2] if stack or stacks == 1 else [2, 2]) + [1] * cells:
                cell = Cell(before, last, width << stack, stride, further)
                made.append(cell)
                before, last, further = last, cell.channels, stride == 2
        self.cells, self.head = nn.ModuleList(made), chain(nn.ReLU(), head(last))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of all classes."""
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(last)


# ---- random wirings


class Node(nn.Module):
    """A weighted sum of what it reads, a ReLU, and a depthwise separable convolution with a batch norm."""

    def __init__(self, inside: int, outside: int, reads: int, stride: int):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(reads)) if reads > 1 else None
        self.deep = nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False)
        self.wide, self.norm = nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside)

    def forward(self, reads: Sequence[Tensor]) -> Tensor:
        """Return features of shape (n, outside, height / stride, width / stride)."""
        total = reads[0]
        if self.weights is not None:
            weights = torch.sigmoid(self.weights)
            total = sum((weights[k] * x for k, x in enumerate(reads[1:], 1)), weights[0] * reads[0])
        return self.norm(self.wide(self.deep(functional.relu(total))))


class Wiring(nn.Module):
    """Nodes wired as in a small world of Watts and Strogatz, each edge from the lower number to the higher."""

    def __init__(self, inside: int, outside: int, nodes: int, seed: int):
        super().__init__()
        world = nx.connected_watts_strogatz_graph(nodes, 4, 0.75, seed=seed)
        self.reads = [sorted(u for u in world.neighbors(v) if u < v) for v in range(nodes)]
        read = {u for reads in self.reads for u in reads}
        self.last = [v for v in range(nodes) if v not in read]
        self.nodes = nn.ModuleList(
            Node(outside if reads else inside, outside, len(reads) or 1, 1 if reads else 2)
            for reads in self.reads
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the nodes that none reads."""
        made: list[Tensor] = []
        for node, reads in zip(self.nodes, self.reads, strict=True):
            made.append(node([made[u] for u in reads] or [x]))
        return sum((made[v] for v in self.last[1:]), made[self.last[0]]) / len(self.last)


def random_wired(
    channels: int = 78, nodes: int = 32, stages: int = 3, classes: int = 1000
) -> nn.Module:
    """Return the small regime of the paper: a stem, and stages twice as deep and half as wide as the one before."""
    layers, inside = [Conv(3, channels // 2, 3, 2), Conv(channels // 2, channels, 3, 2)], channels
    wirings = list[nn.Module]()
    for stage in range(stages):
        wirings.append(Wiring(inside, channels << stage, nodes, seed=stage))
        inside = channels << stage
    return chain(*layers, *wirings, nn.ReLU(), Conv(inside, 1280), head(1280, classes))


# ---- what the book trains


def two_layer_mlp(pixels: int = 28 * 28, hidden: int = 256) -> nn.Module:
    return chain(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def lenet() -> nn.Module:
    return chain(
        nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Sigmoid(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.Sigmoid(), nn.Linear(120, 84), nn.Sigmoid(),
        nn.Linear(84, 10),
    )  # fmt: skip


class Kind(NamedTuple):
    """How a network is made, the pixels of its images each way, and what streams gain in the literature, batch 1."""

    make: Callable[[], nn.Module]
    pixels: int
    gain: float | None = None


NETWORKS = {
    "Inception-v3": Kind(inception_v3, 299, 1.41),  # Ding et al., "IOS", MLSys 2021, greedy streams
    "GoogLeNet": Kind(googlenet, 224, 1.68),  # Chen et al., "Opara", 2025
    "NASNet-like": Kind(NasNetLike, 224),
    "random-wired": Kind(random_wired, 224),
}
REHEARSED = {"random-wired": Kind(lambda: random_wired(4, 5, 1, 10), 16)}
