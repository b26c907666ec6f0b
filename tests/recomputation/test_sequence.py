"""Plans of what is repeated: the law of every plan, optima by brute force, and known ones."""

import functools
import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched._lib.jit import Mode
from autosched.recomputation import annealing, sequence
from autosched.recomputation.chains import Chain
from autosched.recomputation.sequence import Plan, Step, planned


def peak(steps: list[Step], order: tuple[int, ...]) -> float:
    """Return the peak of an order, by the definition: a value is there from its run to its last reader."""
    most = 0.0
    for now in range(len(order)):
        held = 0.0
        for begin in range(now + 1):
            step = order[begin]
            later = order[begin + 1 :]
            until = later.index(step) if step in later else len(later)
            uses = [begin + 1 + i for i in range(until) if step in steps[later[i]].reads]
            is_last = steps[step].is_kept and until == len(later)
            if begin == now or is_last or (uses and uses[-1] >= now):
                held += steps[step].nbytes
        most = max(most, held)
    return most


def check(steps: list[Step], plan: Plan, limit: float) -> None:
    """Check the law: first runs in order, repetitions where they may be, memory and time as said."""
    seen = 0
    for step in plan.order:
        if step == seen:
            seen += 1
        else:
            assert step < seen <= steps[step].last_repeat
    assert seen == len(steps)
    assert peak(steps, plan.order) == plan.peak <= limit
    assert plan.seconds == pytest.approx(sum(steps[i].seconds for i in plan.order))


def brute_force(steps: list[Step], limit: float) -> float:
    """Return the least seconds, by trying each run and each loss in each state."""
    best = {}
    heap = [(0.0, 0, ())]
    while heap:
        took, following, memory = heapq.heappop(heap)
        if (following, memory) in best:
            continue
        best[following, memory] = took
        if following == len(steps) and all(i in memory for i, s in enumerate(steps) if s.is_kept):
            return took
        for lost in memory:
            heapq.heappush(heap, (took, following, tuple(i for i in memory if i != lost)))
        for i, step in enumerate(steps[: following + 1]):
            may = i == following or following <= step.last_repeat
            held = {*memory, i}
            fits = sum(steps[j].nbytes for j in held) <= limit
            if may and i not in memory and fits and {*step.reads} <= {*memory}:
                after = took + step.seconds, following + (i == following), tuple(sorted(held))
                heapq.heappush(heap, after)
    return math.inf


@st.composite
def graphs(draw, least: int = 1, most: int = 7) -> list[Step]:
    count = draw(st.integers(least, most))
    steps = []
    for i in range(count):
        near = st.integers(max(0, i - 5), i - 1) if i else st.nothing()
        reads = draw(st.lists(near, max_size=3, unique=True)) if i else []
        last = draw(st.sampled_from([-1, count - 1, count, count, draw(st.integers(i, count))]))
        size, seconds = draw(st.integers(0, 4)), draw(st.integers(0, 5))
        steps.append(Step(seconds, size, tuple(reads), last, draw(st.integers(0, 5)) == 0))
    return steps


def chain(length: int) -> list[Step]:
    """Return steps forward, and as many back, each of which reads the one before and one forward."""
    steps = [Step(1, 1, (i - 1,) if i else (), 2 * length) for i in range(length)]
    for i in range(length):
        steps.append(Step(1, 0, (length - 1 - i, length + i - 1)[: 2 if i else 1]))
    return steps


@given(graphs())
def test_few_steps_are_planned_as_well_as_by_brute_force(steps):
    last = sequence.last_uses(steps)
    for limit in range(int(sequence.peak_of(steps, range(len(steps)))) + 1):
        best = brute_force(steps, limit)
        plan = planned(steps, limit)
        assert (plan.seconds if plan else math.inf) == best
        if plan:
            check(steps, plan, limit)
        assert best == math.inf or sequence.least_room(steps, last) <= limit


@functools.cache
def binomial(length: int, room: int) -> float:
    """Return the fewest runs forward of a chain (Griewank and Walther, TOMS 26(1), 2000)."""
    if length <= 1:
        return length if room else math.inf * length
    if room <= 1:
        return math.inf
    return min(
        i + binomial(length - i, room - 1) + binomial(i - 1, room) for i in range(1, length + 1)
    )


@pytest.mark.parametrize(("length", "room"), [(4, 2), (5, 3), (6, 3), (6, 4), (20, 4)])
def test_chains_are_repeated_as_often_as_known(length, room):
    steps = chain(length)
    plan = planned(steps, room)
    check(steps, plan, room)
    assert plan.seconds == length + binomial(length, room)


@pytest.mark.parametrize(("length", "room"), [(30, 3), (40, 5), (60, 6), (60, 12)])
def test_long_chains_begin_with_their_optimum(length, room):
    steps = chain(length)
    plain = range(2 * length)
    profile, last = sequence.profile_of(steps, plain), sequence.last_uses(steps)
    runs = {(i, i) for i in plain}.union(Chain(steps, profile, last, room).repetitions())
    order = tuple(step for _, step in sorted(runs))
    assert peak(steps, order) <= room
    assert len(order) == length + binomial(length, room)


@given(graphs(17, 30), st.floats(0.3, 1))
def test_plans_of_more_steps_keep_the_law(steps, part):
    limit = round(part * peak(steps, tuple(range(len(steps)))))
    if plan := planned(steps, limit):
        check(steps, plan, limit)


def test_what_only_a_repetition_reads_is_kept_for_it():
    steps = [Step(10, 1, (), 4), Step(1, 5, (0,), 4), Step(1, 5, (), 4), Step(1, 1, (2,), 4)]
    plan = planned([*steps, Step(1, 1, (1, 3))], 8)
    assert plan.order == (0, 1, 2, 3, 1, 4)


def test_compiled_or_not_the_order_is_the_same(monkeypatch):
    steps = chain(12)
    monkeypatch.setattr(annealing, "_MOVES", 1)
    orders = []
    for fast in (True, False):
        monkeypatch.setattr(annealing, "mode", lambda *_, fast=fast: Mode(fast))
        orders.append(annealing.improved(steps, [], 5.0, None))
    assert orders[0] == orders[1] != tuple(range(24))


def transformer(layers: int) -> list[Step]:
    """Return a training step of layers whose products cost 50 to 400, and other operators 1."""
    steps: list[Step] = []

    def add(seconds: int, nbytes: int, *reads: int) -> int:
        steps.append(Step(seconds, nbytes, tuple(sorted({*reads})), 100 * layers))
        return len(steps) - 1

    def norm(x: int) -> tuple[int, int, int]:
        scale = add(1, 1, add(1, 1, add(1, 4, x)))
        y = add(1, 4, x, scale)
        return add(1, 4, y), scale, y

    def norm_back(grad: int, x: int, scale: int, y: int) -> int:
        add(1, 0, grad, y)
        return add(1, 4, add(1, 4, grad, scale), add(1, 1, grad, x, scale), x)

    x, back = add(1, 4), []
    for _ in range(layers):
        n1, *s1 = norm(x)
        q, v = add(100, 4, n1), add(100, 4, n1)
        a = add(50, 4, q, v)
        middle = add(1, 4, x, add(100, 4, a))
        n2, *s2 = norm(middle)
        gate, up = add(400, 16, n2), add(400, 16, n2)
        sigmoid = add(1, 16, gate)
        act = add(1, 16, gate, sigmoid)
        product = add(1, 16, act, up)
        back.append((x, n1, s1, q, v, a, middle, n2, s2, gate, up, sigmoid, act, product))
        x = add(1, 4, middle, add(400, 4, product))
    grad = add(1, 4, x)
    for x, n1, s1, q, v, a, middle, n2, s2, gate, up, sigmoid, act, product in reversed(back):
        inner = add(400, 16, grad)
        add(400, 0, grad, product)
        outer = add(1, 16, inner, up)
        to_up = add(1, 16, inner, act)
        to_gate = add(1, 16, outer, gate, sigmoid)
        add(400, 0, to_gate, n2), add(400, 0, to_up, n2)
        grad = add(1, 4, grad, norm_back(add(400, 4, to_up, add(400, 4, to_gate)), middle, *s2))
        add(100, 0, grad, a)
        inner = add(100, 4, grad)
        to_q, to_v = add(50, 4, inner, v), add(50, 4, inner, q)
        add(100, 0, to_q, n1), add(100, 0, to_v, n1)
        grad = add(1, 4, grad, norm_back(add(100, 4, to_v, add(100, 4, to_q)), x, *s1))
    return steps


def test_no_product_of_a_deep_network_is_repeated_where_other_operators_suffice():
    steps = transformer(24)
    plan = planned(steps, 0.46 * sequence.peak_of(steps, range(len(steps))))
    assert plan.seconds - sum(step.seconds for step in steps) < 300, "others cost 1 each"
    assert {steps[i].seconds for i in plan.order if plan.order.count(i) > 1} == {1}


def test_a_device_without_steps_holds_what_it_has():
    within = planned([], 8.0, base=8.0)
    assert within
    assert within.peak == 8.0
    assert planned([], 7.0, base=8.0) is None
