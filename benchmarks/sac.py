"""Compare the update of soft actor-critic on a CPU with eager execution and torch.compile.

One update trains two critics, the actor and the temperature, and moves the target networks. What is
random is an argument, so that all contestants compute the same. torch.compile compiles the two losses
and, in a contestant of its own, the optimizers' steps too; autosched compiles the whole update.

As in ``fused.py``, contestants take turns in one process, and before they are measured, the losses and
weights of five updates are compared with eager ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _report import parser, publish, table
from fused import FUSED, Contestant, Run, columns, measured, row
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc

OBSERVED, ACTIONS = 17, 6
DISCOUNT, ENTROPY, STEP = 0.99, -6.0, 0.005

Noise = tuple[Tensor, Tensor]  # for the actions before and after the step
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Noise]


def network(inputs: int, outputs: int, width: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Agent(nn.Module):
    """The networks, and the losses of an update."""

    def __init__(self, width: int):
        super().__init__()
        self.actor = network(OBSERVED, 2 * ACTIONS, width)
        self.critics = nn.ModuleList(network(OBSERVED + ACTIONS, 1, width) for _ in range(2))
        self.targets = nn.ModuleList(network(OBSERVED + ACTIONS, 1, width) for _ in range(2))
        self.targets.load_state_dict(self.critics.state_dict())
        self.temperature = nn.Parameter(torch.zeros(()))

    def act(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, and the logarithms of their probabilities."""
        mean, spread = self.actor(state).chunk(2, -1)
        spread = spread.clamp(-5, 2)
        action = mean + spread.exp() * noise
        squashed = torch.tanh(action)
        log = -0.5 * noise.square() - spread - torch.log(1 - squashed.square() + 1e-6)
        return squashed, log.sum(-1, keepdim=True)

    def critic_loss(
        self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, noise: Tensor
    ) -> Tensor:
        """Return the loss of both critics."""
        with torch.no_grad():
            wanted, log = self.act(following, noise)
            pair = torch.cat([following, wanted], 1)
            least = torch.minimum(*(target(pair) for target in self.targets))
            goal = reward + DISCOUNT * (least - self.temperature.exp() * log)
        pair = torch.cat([state, action], 1)
        losses = [functional.mse_loss(critic(pair), goal) for critic in self.critics]
        return losses[0] + losses[1]

    def actor_loss(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of the actor, and that of the temperature."""
        action, log = self.act(state, noise)
        pair = torch.cat([state, action], 1)
        least = torch.minimum(*(critic(pair) for critic in self.critics))
        loss = (self.temperature.exp().detach() * log - least).mean()
        return loss, -(self.temperature * (log.detach() + ENTROPY)).mean()


def update(width: int, batch: Batch, way: str, streams: Any) -> tuple[Run, Callable[[], Any]]:
    """Return the call of an update, and the tensors that it changes."""
    torch.manual_seed(0)
    agent = Agent(width)
    adam = functools.partial(torch.optim.Adam, lr=3e-4)
    optimizers = [adam(agent.critics.parameters()), adam(agent.actor.parameters())]
    optimizers.append(adam([agent.temperature]))
    critic_loss, actor_loss = agent.critic_loss, agent.actor_loss
    steps = [optimizer.step for optimizer in optimizers]
    if way.startswith("torch.compile"):
        torch._dynamo.reset()
        critic_loss, actor_loss = map(torch.compile, (critic_loss, actor_loss))
    if way.endswith("optimizers compiled"):
        steps = list(map(torch.compile, steps))

    def train(
        state: Tensor, action: Tensor, reward: Tensor, following: Tensor, noise: Noise
    ) -> tuple[Tensor, ...]:
        first = critic_loss(state, action, reward, following, noise[0])
        optimizers[0].zero_grad()
        first.backward()
        steps[0]()
        second, third = actor_loss(state, noise[1])
        for optimizer in optimizers[1:]:
            optimizer.zero_grad()
        (second + third).backward()  # torch.compile makes one backward of both
        for step in steps[1:]:
            step()
        with torch.no_grad():
            for new, old in zip(
                agent.critics.parameters(), agent.targets.parameters(), strict=True
            ):
                old.lerp_(new, STEP)
        return first.detach(), second.detach(), third.detach()

    call: Callable[..., Any] = train
    if way.startswith("autosched"):
        machine = asc.Machine.local(gpus=0, cpu_streams=streams)
        call = asc.compile(train, machine, fuse=way.startswith(FUSED))
    return lambda: call(*batch), agent.state_dict


WAYS = {
    "eager": 1,
    "torch.compile": 1,
    "torch.compile, optimizers compiled": 1,
    "autosched": 1,
    "autosched, streams": "auto",
    FUSED: "auto",
}


def main() -> None:
    chosen = parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rounds = 8 if chosen.quick else 30
    threads = torch.get_num_threads()
    rows = []
    for width, size in [(256, 256)] if chosen.quick else [(64, 64), (256, 256)]:
        batch: Batch = (
            torch.randn(size, OBSERVED),
            torch.rand(size, ACTIONS),
            torch.randn(size, 1),
            torch.randn(size, OBSERVED),
            (torch.randn(size, ACTIONS), torch.randn(size, ACTIONS)),
        )
        contestants = [
            Contestant(way, threads, functools.partial(update, width, batch, way, streams))
            for way, streams in WAYS.items()
        ]
        found = measured(contestants, rounds, False)
        rivals = [way for way in WAYS if way.startswith("torch")]
        rows.append(row(f"width {width}, batch {size}", found, rivals))
    text = f"{threads} threads, us\n\n{table(['', *WAYS, *columns(False)], rows)}"
    publish("sac", "The update of soft actor-critic", [text], chosen)


if __name__ == "__main__":
    main()
