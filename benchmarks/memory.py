"""Compare plans that repeat steps within a limit of memory with optima, solvers and other planners.

Plans are those of ``autosched.recomputation``, which a schedule asks when memory does not suffice.
"""

from __future__ import annotations

import functools
import math
import random
import time
from collections.abc import Iterator

import torch
from _budgets import captured, models
from _report import parser, publish, table

from autosched.recomputation.sequence import Plan, Step, peak_of, planned

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05)
# Samples of the largest batch of VGG19: github.com/parasj/checkmate, branch mlsys20_artifact, README.
CHECKMATE = {"keep all": 167, "Chen, sqrt(n)": 197, "Chen, greedy": 266, "Checkmate": 289}


def percent(plan: Plan | None, once: float) -> str:
    return f"+{plan.seconds / once - 1:.2%}" if plan else "none"


def plain_peak(steps: list[Step]) -> float:
    return peak_of(steps, range(len(steps)))


# ---- chains


def chain(length: int) -> list[Step]:
    """Return equal steps forward, and as many back, each of which reads the one before and one forward."""
    steps = [Step(1, 1, (i - 1,) if i else (), 2 * length) for i in range(length)]
    for i in range(length):
        steps.append(Step(1, 0, (length - 1 - i, length + i - 1)[: 2 if i else 1]))
    return steps


@functools.cache
def fewest(length: int, room: int) -> float:
    """Return the fewest runs forward, by the recursion that Griewank and Walther solve."""
    if length <= 1:
        return length if room else math.inf * length
    if room <= 1:
        return math.inf
    return min(i + fewest(length - i, room - 1) + fewest(i - 1, room) for i in range(1, length + 1))


def chains(quick: bool) -> str:
    rows = []
    for length, room in (
        ((20, 4), (50, 5)) if quick else ((20, 4), (50, 5), (50, 8), (100, 4), (100, 10))
    ):
        steps = chain(length)
        began = time.perf_counter()
        plan = planned(steps, room)
        took = time.perf_counter() - began
        made = f"{plan.seconds - 2 * length:.0f}" if plan else "none"
        rows.append(
            (f"{length}", f"{room}", f"{fewest(length, room) - length:.0f}", made, f"{took:.1f} s")
        )
    return table(
        ("steps forward", "in memory", "fewest repetitions", "planned", "time to plan"), rows
    )


# ---- layered graphs


def layered(count: int, seed: int) -> list[Step]:
    """Return steps in layers, each of which reads up to four of earlier layers, most of the last."""
    draw = random.Random(seed)
    width = round(count**0.5)
    layers: list[list[int]] = []
    steps: list[Step] = []
    while len(steps) < count:
        size = min(count - len(steps), draw.randint(width // 2, width + width // 2))
        layers.append([*range(len(steps), len(steps) + size)])
        for _ in layers[-1]:
            reads = set()
            for _ in range(draw.randint(1, 4) if len(layers) > 1 else 0):
                back = 1
                while back < len(layers) - 1 and draw.random() < 0.25:
                    back += 1
                if draw.random() < 0.1:
                    back = draw.randint(1, len(layers) - 1)
                reads.add(draw.choice(layers[-1 - back]))
            seconds, nbytes = draw.randint(1, 20), draw.randint(1, 20)
            steps.append(Step(seconds, nbytes, tuple(sorted(reads)), count))
    return steps


def layers(quick: bool, limit: float, seconds: float) -> str:
    from _intervals import solved

    rows = []
    for count, seed, part in (
        ((100, 0, 0.8),)
        if quick
        else tuple((n, s, p) for n in (100, 250) for s in (0, 1) for p in (0.9, 0.8))
    ):
        steps = layered(count, seed)
        room = round(part * plain_peak(steps))
        once = sum(step.seconds for step in steps)
        began = time.perf_counter()
        plan = planned(steps, room)
        took = time.perf_counter() - began
        longer = planned(steps, room, seconds=seconds)
        begun = solved(steps, room, limit, longer.order if longer else ())
        found = f"+{begun.seconds / once - 1:.2%}" if begun.seconds < math.inf else "none"
        rows.append(
            (
                f"{count}, seed {seed}", f"{part:.0%}", percent(plan, once), f"{took:.1f} s",
                percent(longer, once), found, f"+{begun.bound / once - 1:.2%}",
            )
        )  # fmt: skip
    head = ("steps", "memory", "planned", "time to plan", f"in {seconds:.0f} s")
    return table((*head, "CP-SAT from there", "its bound"), rows)


# ---- torch's budgets


def budgets(quick: bool) -> Iterator[str]:
    torch.manual_seed(0)
    for name, make, x in models(quick):
        found = captured(make(), x, BUDGETS)
        once = sum(step.seconds for step in found.steps)
        peaks = [peak_of(found.steps, found.orders[budget]) for budget in BUDGETS]
        plans = [planned(found.steps, peak) for peak in peaks]
        rows = []
        for budget, peak in zip(BUDGETS, peaks, strict=True):
            fitting = (plan for plan in plans if plan and plan.peak <= peak)
            plan = min(fitting, key=lambda plan: plan.seconds, default=None)
            took = sum(found.steps[i].seconds for i in found.orders[budget])
            rows.append(
                (f"{budget}", f"{peak / 1e6:.2f}", f"+{took / once - 1:.2%}", percent(plan, once))
            )
        yield f"{name}: {len(found.steps)} steps, {plain_peak(found.steps) / 1e6:.2f} MB without repetitions."
        yield table(("budget", "peak, MB", "torch repeats", "ours, same peak"), rows)


# ---- the largest batch


def vgg19(batch: int) -> tuple[list[Step], float, float]:
    """Return a training step as Checkmate counts it, the work forward, and fixed bytes.

    A layer costs its multiplications (poolings none) and makes its output, of four bytes; its
    gradient costs twice that and makes as much, from the outputs of the layer and the next one.
    Parameters and their gradients are there all the time.
    """
    made: list[tuple[int, int]] = []  # multiplications and numbers of a layer
    side, inside, parameters = 224, 3, 0
    for width, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            made.append((9 * inside * side * side * width, side * side * width))
            parameters += 9 * inside * width + width
            inside = width
        side //= 2
        made.append((0, side * side * width))
    inside *= side * side
    made.append((0, inside))
    for width in (4096, 4096, 1000):
        made.append((inside * width, width))
        parameters += inside * width + width
        inside = width
    count = len(made)
    last = 2 * count + 1
    steps = [
        Step(work * batch, 4 * numbers * batch, (i - 1,) if i else (), last)
        for i, (work, numbers) in enumerate(made)
    ]
    steps.append(Step(0, 4 * batch, (count - 1,), last))
    for i in reversed(range(count)):
        work, numbers = made[i]
        reads = tuple(sorted({i, i + 1, len(steps) - 1}))
        steps.append(Step(2 * work * batch, 4 * numbers * batch, reads, last))
    return steps, sum(work for work, _ in made) * batch, 8.0 * parameters


def largest_batch() -> str:
    def is_possible(batch: int, again: float) -> bool:
        steps, forward, fixed = vgg19(batch)
        plan = planned(steps, 16e9, base=fixed)
        most = sum(step.seconds for step in steps) + again * forward
        return plan is not None and plan.seconds <= most * (1 + 1e-12)

    found = {}
    for name, again in (("ours, no repetitions", 0.0), ("ours", 1.0)):
        low, high = 1, 1024
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_possible(middle, again) else (low, middle)
        found[name] = low
    rows = [(name, f"{batch}") for name, batch in {**CHECKMATE, **found}.items()]
    return table(("planner", "largest batch"), rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--solver", type=float, default=600, help="seconds for CP-SAT, each time")
    options.add_argument("--longer", type=float, default=20, help="seconds of the longer search")
    chosen = options.parse_args()
    limit = min(chosen.solver, 20) if chosen.quick else chosen.solver
    planned(chain(20), 4)  # compiles
    publish(
        "memory",
        "What is computed again, compared with optima and other planners",
        [
            " ".join((__doc__ or "").split("\n\n", 1)[1].split()),
            "Chains of equal steps forward, and as many back, with few of them in memory; the fewest "
            'repetitions are those of Griewank and Walther ("Algorithm 799: revolve", 2000).',
            chains(chosen.quick),
            "Random layered graphs, within a part of the memory that they take without repetitions: time "
            "beyond that without a limit. CP-SAT has two threads and the intervals of MOCCASIN (arXiv "
            f"2304.14463), up to three runs of a step; it begins with our longer plan and has {limit:.0f} s.",
            layers(chosen.quick, limit, chosen.longer),
            "Training steps captured by AOTAutograd, cut by torch's partitioner with "
            "`activation_memory_budget`: the peak of what operators make, gradients included, and FLOPs "
            "repeated, beside what we repeat within the same peak. Torch's peak may rise when its budget "
            "falls (pytorch#197838); ours is a limit.",
            *budgets(chosen.quick),
            "The largest batch of VGG19 on 16 GB with at most one more pass forward, costs in FLOPs. The "
            "first four are Checkmate's (github.com/parasj/checkmate, branch mlsys20_artifact), whose "
            "289 is certified to be optimal; layers, gradients and fixed memory are counted as its code "
            "does: 4 bytes a number, parameters twice. Without repetitions, ours frees what is not read "
            "any more.",
            largest_batch(),
        ],
        chosen,
        packages=("torch", "ortools", "numba", "numpy"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
