"""Choose the placement that stays good under random deviations of durations.

Replicas that run concurrently finish with the slowest of them, and a task that is late makes others
wait. A plan with a slightly longer predicted makespan and fewer waits may therefore be faster in
most runs.

Each placement is judged by the 95th percentile of its simulated makespans, since replicas of a step
wait for the slowest. All placements are judged by the same draws. Placements made for noisy costs
use other draws than those by which they are judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosched.costs.costs import Costs
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.candidates import candidates, stream_limits
from autosched.policies.literature.heft import heft
from autosched.policies.noise import checked_noise, noisy_costs, noisy_makespans
from autosched.problem import Policy

__all__ = ["robust"]

_PLANS = 4  # made for noisy costs


def robust(
    noise: float = 0.2, *, policies: Sequence[Policy] | None = None, seed: int = 0
) -> Policy:
    """Return the policy whose placement has the least 95th percentile of noisy makespans.

    Of each placement 100 runs are simulated, in which all durations are multiplied by uniform
    random numbers from 1 - noise to 1 + noise, the same for each placement. Placements are those of
    ``policies``, by default those that ``"auto"`` tries and HEFT with noisy costs. Raises
    ScheduleError for noise that is not from 0 to 1; the policy raises it where no other finds a
    placement.

    >>> graph = Graph()
    >>> y = graph.add(abs, graph.input("x"), name="y", seconds={"cpu": 3.0, "cuda:0": 2.0})
    >>> robust(0.2)(graph, Machine.emulated(gpus=1), Costs()).device
    {'y': 'cuda:0'}
    """
    checked_noise(noise)

    def policy(graph: Graph, machine: Machine, costs: Costs) -> Placement:
        found: list[Placement] = []
        refusal = ScheduleError(f"graph {graph.name!r} cannot run on this machine")
        for one, priced in plans(graph, machine, costs):
            try:
                placement = one(graph, machine, priced)
            except ScheduleError as error:
                refusal = error
                continue
            limited = (replace(placement, streams=most) for most in stream_limits(machine, costs))
            found += [each for each in limited if each not in found]
        if not found:
            raise refusal

        def worst(placed: Placement) -> float:
            program = lower(graph, machine, placed, {})
            return noisy_makespans(program, graph, machine, costs, noise, seed=seed)[1]

        return min(found, key=worst)

    def plans(graph: Graph, machine: Machine, costs: Costs) -> Iterator[tuple[Policy, Costs]]:
        for one in candidates(graph, machine) if policies is None else policies:
            yield one, costs
        if policies is None:
            for i in range(_PLANS):
                # Other draws than those by which plans are judged, or these plans would look
                # better than they are.
                yield heft, noisy_costs(graph, machine, costs, noise, seed=seed + 1 + i)

    policy.__name__ = "robust"
    return policy
