"""What counts as the same result, and that faults of kernels are noticed within three runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.errors import InterleavingError
from autosched.fusion.region import Results, find_mismatch, references
from tests.frontends.steps import stepper
from tests.fusion.regions import call, compiled_by, region, region_of
from tests.serial import some

aten = torch.ops.aten
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def agree(found: Any, expected: Any, before: Any = None, others: Sequence[Any] = ()) -> bool:
    """Whether one result counts as the same; ``others`` are what references compute."""
    again = [Results([each], [before]) for each in others]
    unit = (
        torch.finfo(expected.dtype).eps
        if isinstance(expected, Tensor) and expected.dtype in DTYPES
        else 1e-7
    )
    return find_mismatch([found], Results([expected], [before]), lambda: again, unit) is None


# ---- rules


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_may_differ_by_rounding(dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 3, 101).to(dtype)
    unit = torch.finfo(dtype).eps
    assert agree(x * (1 + unit), x)
    assert agree(x, x.clone())
    assert not agree(x * 1.1, x)
    assert not agree(-x, x)
    one_off = x.clone()
    one_off[50:51] += 1
    assert not agree(one_off, x)


def test_a_result_of_another_kind_is_another_result() -> None:
    x = torch.ones(3)
    assert not agree(x.double(), x)
    assert not agree(x[:2], x)
    assert not agree(x[0], x[0].item())
    assert not agree(2, 2.0)
    assert agree(2.0, 2.0 + 1e-12)
    assert not agree(2.0, 2.1)
    assert not agree(True, False)


def test_double_precision_agrees_to_1e_10() -> None:
    x = torch.linspace(-2, 3, 101, dtype=torch.float64)
    assert agree(x * (1 + 1e-11), x)
    assert not agree(x * (1 + 1e-9), x)


def test_what_is_written_is_judged_by_how_it_changes() -> None:
    weight, step = torch.linspace(1, 2, 50), torch.linspace(-1, 1, 50) * 1e-4
    assert agree(weight + step * 1.0001, weight + step, weight)
    for wrong in (-step, 0 * step, 1.1 * step):
        assert not agree(weight + wrong, weight + step, weight)
    assert agree(weight - step, weight + step)  # a new result of this size


def test_integers_bools_and_what_is_not_finite_must_be_equal() -> None:
    whole, chosen = torch.arange(100), torch.arange(100) % 3 == 0
    for expected in (whole, chosen):
        wrong = expected.clone()
        wrong[7] = not wrong[7]
        assert agree(expected.clone(), expected)
        assert not agree(wrong, expected)
    numbers = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert agree(numbers.clone(), numbers)
    for i, value in ((0, float("nan")), (1, 1.0), (2, 9.0), (3, float("inf"))):
        wrong = numbers.clone()
        wrong[i] = value
        assert not agree(wrong, numbers)


def test_ties_may_be_decided_otherwise_where_rounding_decides_them() -> None:
    chosen = torch.arange(100) % 2 == 0
    one, other, many = chosen.clone(), chosen.clone(), ~chosen
    one[3] = True
    other[8] = False
    assert not agree(one, chosen)
    assert not agree(one, chosen, others=[chosen.clone()])
    assert agree(one, chosen, others=[other])  # another one is decided otherwise there
    assert not agree(many, chosen, others=[other])


def test_noise_may_differ_as_far_as_references_do() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, other, third = torch.randn(3, 1000, generator=generator) * 1e-9
    assert not agree(noise, other)
    assert agree(noise, other, others=[third])
    assert not agree(noise + 1e-3, other, others=[third])


def test_squares_of_noise_may_differ_as_squares_do() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, other, third = torch.randn(3, 1000, generator=generator) * 1e-8
    found, before = (5 * noise).square(), third.square()
    expected, exact = other.square() + 0.9 * before, 0.9 * before
    assert agree(found, expected, before, others=[exact])
    assert not agree(100 * found, expected, before, others=[exact])
    assert not agree(found, expected, before, others=[expected * (1 + 1e-6)])  # it has digits
    large = [1e10 * each for each in (found, expected, before, exact)]
    assert not agree(*large[:3], others=large[3:])


def test_references_compute_in_double_precision_and_from_disturbed_arguments() -> None:
    def run(args: Sequence[Any]) -> Results:
        (x, mask) = args
        before = [x.clone()]
        low = x.to(torch.bfloat16) @ torch.ones(3, 3, dtype=torch.bfloat16)
        x.mul_(3)
        return Results([low.float(), mask, x], [None, None, *before])

    x, mask = torch.rand(4, 3) + 0.1, torch.tensor([0.0, 1.0, 2.0])
    given = x.clone()
    state = torch.random.get_rng_state()
    exact, disturbed = references(run, [x, mask], 2**-8)
    assert torch.equal(x, given)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert exact.made[0].dtype == torch.float64
    torch.testing.assert_close(exact.made[0], x.double() @ torch.ones(3, 3).double())
    assert torch.equal(exact.before[2], x.double())
    changes = (disturbed.before[2] / x - 1).abs()
    torch.testing.assert_close(changes, torch.full((4, 3), 2**-8), rtol=1e-3, atol=1e-6)
    assert torch.equal(disturbed.made[1], mask)  # whole numbers are masks or counters


def test_single_precision_is_disturbed_by_several_units() -> None:
    """The gradient of a bias before a batch norm is zero; sums round it to more than one unit."""
    unit = torch.finfo(torch.float32).eps
    x = torch.rand(1000) + 0.1
    _, disturbed = references(lambda args: Results([args[0]], [None]), [x], unit)
    changes = (disturbed.made[0].double() / x.double() - 1).abs()
    assert 7 * unit < changes.min() <= changes.max() < 9 * unit


def test_a_reference_that_cannot_run_is_left_out() -> None:
    def run(args: Sequence[Any]) -> Results:
        if args[0].dtype == torch.float64:
            raise RuntimeError("no kernel for double precision")
        return Results([args[0] * 2], [None])

    assert len(references(run, [torch.rand(3)], 1e-7)) == 1


@pytest.mark.parametrize(("error", "is_noise"), [(6e-8, True), (1e-5, False)])
def test_what_is_made_in_single_precision_is_no_more_exact_in_double(
    error: float, is_noise: bool
) -> None:
    """Of ``linspace`` without a dtype, kernels make other last bits, which a cast keeps."""

    def run(args: Sequence[Any]) -> Results:
        return Results([torch.linspace(0.5, 1.5, 7).double() * args[0]], [None])

    x = torch.ones(7, dtype=torch.float64)
    expected, unit = run([x]), torch.finfo(torch.float32).eps
    found = expected.made[0] + error
    mismatch = find_mismatch([found], expected, lambda: references(run, [x], unit), unit)
    assert (mismatch is None) == is_noise


# ---- when a region is compared

RUNS = [1, 2, 3, 10, 100, 1000]


def counted(x: Tensor) -> Tensor:
    calls.append(1)
    return x * 2


calls: list[int] = []


def compared_runs(run: Callable[[int], Any], count: int) -> list[int]:
    """Return the runs in which the tasks of a region are called, of so many."""
    found = []
    for number in range(1, count + 1):
        calls.clear()
        run(number)
        if calls:
            found.append(number)
    return found


@pytest.fixture
def compiled() -> Iterator[Any]:
    with compiled_by() as graphs:
        yield graphs


def test_some_runs_for_each_kind_of_arguments_are_compared(compiled: Any) -> None:
    made = region(counted)
    assert compared_runs(lambda _: call(made, torch.ones(3)), 1001) == RUNS
    assert compared_runs(lambda _: call(made, torch.ones(2, 2)), 5) == [1, 2, 3]


def test_a_number_with_a_new_sign_is_compared(compiled: Any) -> None:
    made = region(lambda x, rate: counted(x) * rate, inputs=2)
    rates = {5: 0.2, 6: 0.0, 7: 0.3, 8: -0.1, 9: -0.5}
    found = compared_runs(lambda number: call(made, torch.ones(3), rates.get(number, 0.1)), 9)
    assert found == [1, 2, 3, 6, 8]


def test_trials_are_not_counted(compiled: Any) -> None:
    made = region(counted)
    made.compares = False
    call(made, torch.ones(3))
    assert compared_runs(lambda _: call(made, torch.ones(3)), 4) == []
    made.begin_to_compare()
    assert compared_runs(lambda _: call(made, torch.ones(3)), 4) == [1, 2, 3]


# ---- faults


def without_alpha(graph: torch.fx.GraphModule) -> None:
    """Drop factors: what Inductor does where it joins a sum and a product of matrices."""
    for node in graph.graph.nodes:
        if node.target is aten.mul.Tensor and isinstance(node.args[1], float) and node.args[1] < 0:
            node.replace_all_uses_with(node.args[0])


def nothing_written(graph: torch.fx.GraphModule) -> None:
    """Lose the first write."""
    node = next(n for n in graph.graph.nodes if n.target is aten.copy_.default)
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def without_decay(graph: torch.fx.GraphModule) -> None:
    """Take factors close to one for one, as those of weight decay are."""
    for node in graph.graph.nodes:
        factor = node.args[1] if node.target is aten.mul.Tensor else None
        if isinstance(factor, float) and 0.99 < factor < 1:
            node.replace_all_uses_with(node.args[0])


def other_moment(graph: torch.fx.GraphModule) -> None:
    """Take a root of another tensor's square: zero moments hide it."""
    for node in graph.graph.nodes:
        if node.target is aten.sqrt.default:
            with graph.graph.inserting_after(node):
                node.target = aten.mul.Tensor
                node.args = (node.args[0], 2.0)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, foreach=False)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=False)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, foreach=True)


FAULTS = [
    *((without_alpha, sgd), (nothing_written, sgd), (nothing_written, adam)),
    *((without_decay, decayed), (other_moment, adam)),
]


@pytest.mark.parametrize(("fault", "optimizer"), some(FAULTS, FAULTS[0], *FAULTS[2:4]))
def test_a_fault_in_kernels_is_noticed_in_three_steps_and_results_are_right(
    fault: Callable[[Any], None], optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def faulty(graph: torch.fx.GraphModule, args: Any, threads: int) -> Any:
        twin = copy.deepcopy(graph)
        fault(twin)
        twin.recompile()
        return twin

    def trained(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        own = optimizer(model.parameters())

        step = stepper(model, own, lambda model, x, y: nn.functional.mse_loss(model(x), y))
        run = asc.compile(step, asc.Machine.emulated(gpus=0), fuse=True) if compiles else step
        losses = [run(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(4)]
        if compiles:
            run.close()  # type: ignore[attr-defined]
        return [*losses, *model.parameters()]

    expected = trained(False)
    with compiled_by(faulty), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(True)
    messages = [str(each.message) for each in seen if "kernels differ" in str(each.message)]
    assert messages
    assert all("added at" in each and "report it" in each for each in messages)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_new_value_in_place_of_an_old_one_is_noticed() -> None:
    def faulty(graph: torch.fx.GraphModule, args: Any, threads: int) -> Any:
        def run(x: Tensor) -> list[Tensor]:
            graph(x)
            return [x * 2]

        return run

    graph = asc.Graph()
    x = graph.input("x")
    old = x * 2
    x.add_(1)
    made, x = region_of(graph, [old]), torch.ones(2)
    with compiled_by(faulty), pytest.warns(RuntimeWarning, match="the result of 'mul'"):
        found = call(made, x)
    assert found.tolist() == x.tolist() == [2.0, 2.0]


def test_a_region_whose_kernels_differ_is_never_fused_again() -> None:
    def wrong(graph: Any, args: Any, threads: int) -> Any:
        return lambda *values: [item + 1 for item in graph(*values)]

    with compiled_by(wrong) as graphs:
        made, twin = region(counted), region(counted)
        with pytest.warns(RuntimeWarning, match="compiled kernels differ from the operators"):
            assert call(made, torch.ones(3)).tolist() == [2.0] * 3
        assert call(made, torch.ones(3)).tolist() == [2.0] * 3
        assert call(made, torch.ones(5)).tolist() == [2.0] * 5
        assert call(twin, torch.ones(3)).tolist() == [2.0] * 3  # shares the kernels
        assert len(graphs) == 1
    for each in (made, twin):
        assert "'counted', added at" in str(each.failure)
        assert "by up to 1, where it is up to 2" in str(each.failure)


def test_kernels_that_fail_are_replaced_by_operators() -> None:
    def failing(graph: Any, args: Any, threads: int) -> Any:
        def run(x: Tensor, y: Tensor) -> Any:
            x.add_(100)
            raise RuntimeError("no such kernel")

        return run

    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    x.add_(y)
    with compiled_by(failing):
        made, x = region_of(graph, [x * 2]), torch.ones(2)
        assert call(made, x, torch.ones(2)).tolist() == [4.0, 4.0]
        assert x.tolist() == [2.0, 2.0]
        assert made.failure == "its kernels fail: RuntimeError: no such kernel"


def test_asc_testing_check_notices_kernels_that_differ() -> None:
    def wrong(graph: Any, args: Any, threads: int) -> Any:
        return lambda *values: [item * 1.5 for item in graph(*values)]

    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x * 2 + 1).relu())
    machine, examples = asc.Machine.emulated(gpus=1), {"x": torch.ones(3)}
    with compiled_by():
        fused = asc.fuse(graph, machine, policy="single")
        assert asc.testing.check(fused, machine, examples=examples, interleavings=1).schedules
    with compiled_by(wrong), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = asc.fuse(graph, machine, policy="single")
        with pytest.raises(InterleavingError, match="kernels differ from the operators mul"):
            asc.testing.check(fused, machine, examples=examples, interleavings=1)
