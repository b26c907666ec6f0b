"""The chapter "Training on Multiple GPUs" of Dive into Deep Learning: LeNet, from scratch, on one GPU and on two.

http://d2l.ai/chapter_computational-performance/multiple-gpus.html

There the batch is cut, each GPU computes its gradients, ``allreduce`` sums them and each GPU
updates its parameters, line by line. Here the same network trains by
``asc.parallel.data_parallel``. Data: the digits of scikit-learn, or Fashion-MNIST with
``--fashion-mnist FOLDER``. Exit code 1 if training differs from the serial one, or learns less than
expected.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import book
import torch
from torch import Tensor, nn
from torch.nn import functional


def initial_parameters() -> list[Tensor]:
    """Return weight and bias of two convolutions and two dense layers."""
    torch.manual_seed(0)
    shapes = (20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)
    weights = [torch.randn(shape) / torch.Size(shape[1:]).numel() ** 0.5 for shape in shapes]
    return [parameter for weight in weights for parameter in (weight, torch.zeros(len(weight)))]


def lenet(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the scores of 10 classes for images of 28x28 pixels."""
    w1, b1, w2, b2, w3, b3, w4, b4 = parameters
    h1 = functional.avg_pool2d(functional.relu(functional.conv2d(x, w1, b1)), 2)
    h2 = functional.avg_pool2d(functional.relu(functional.conv2d(h1, w2, b2)), 2)
    h3 = functional.relu(functional.linear(h2.flatten(1), w3, b3))
    return functional.linear(h3, w4, b4)


class LeNet(nn.Module):
    """A module that holds the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(initial_parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of 10 classes."""
        return lenet(x, list(self.parameters_))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = LeNet()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main() -> int:
    parser = book.parser("LeNet from scratch, on one GPU and on two.")
    parser.add_argument(
        "--fashion-mnist",
        type=Path,
        metavar="FOLDER",
        help="train with the idx files in this folder",
    )
    options = parser.parse_args()
    images = book.fashion_mnist(options.fashion_mnist) if options.fashion_mnist else book.digits(28)
    epochs, least = (4, 0.85) if options.quick else (6, 0.8 if options.fashion_mnist else 0.95)
    return book.compare_gpu_counts("LeNet", make, images, 128, epochs, least, options)


if __name__ == "__main__":
    sys.exit(main())
