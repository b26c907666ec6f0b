"""The chapter "Concise Implementation for Multiple GPUs" of Dive into Deep Learning: ResNet-18 on one GPU and on two.

http://d2l.ai/chapter_computational-performance/multiple-gpus-concise.html

There ``nn.DataParallel`` cuts the batch, copies the network to each GPU in each step and sums
gradients when all are computed; here ``asc.parallel.data_parallel`` has a replica on each GPU and
sums gradients while others are still computed. The network is as deep as the book's and 8 times
narrower, and its images have 16x16 pixels, to run on a CPU. Exit code 1 if training differs from
the serial one, or learns less than expected.
"""

import sys

import book
import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8  # channels of the first block: 64 in the book


class Residual(nn.Module):
    """Two convolutions, and a shortcut around them."""

    def __init__(self, before: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = nn.Conv2d(before, channels, 1, stride) if stride > 1 else nn.Identity()
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (n, channels, height / stride, width / stride)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.conv3(x))


def resnet18(classes: int, channels: int, width: int = WIDTH) -> nn.Sequential:
    """Return the book's ResNet-18 for small images: a smaller first kernel, stride and padding, and no max-pooling."""
    net = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    for i in range(4):
        before, after = width * 2 ** max(i - 1, 0), width * 2**i
        net.append(
            nn.Sequential(
                Residual(before, after, stride=1 if i == 0 else 2), Residual(after, after)
            )
        )
    return net.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes)])


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = resnet18(classes=10, channels=1)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def main() -> int:
    options = book.parser("ResNet-18, on one GPU and on two.").parse_args()
    pixels, epochs, least = (8, 5, 0.85) if options.quick else (16, 6, 0.95)
    return book.compare_gpu_counts(
        "ResNet-18", make, book.digits(pixels), 128, epochs, least, options
    )


if __name__ == "__main__":
    sys.exit(main())
