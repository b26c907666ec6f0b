"""Each module of torch's own list (``module_db``), trained by a schedule as in eager mode."""

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch

import autosched as asc
from autosched._lib.tree import flatten
from tests.frontends.op_samples import operators

STEPS = 3
FIRST = 3  # samples of a module
PIECES = 12  # of the long tests
EACH = 40  # so many modules, one is tried in each run

# What they are told: losses that look at numbers, and batch norms that average over all batches.
ELEMENTS = "reads elements of a tensor"
LOOK = {"nn.CTCLoss": "looks at lengths", "nn.GaussianNLLLoss": ELEMENTS}
AVERAGES = {f"nn.{kind}": ELEMENTS for kind in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")}


class Sample(NamedTuple):
    """A module as it is made, in training or evaluation, and how it is called."""

    name: str
    make: Callable[[], torch.nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def modules() -> list[Any]:
    operators()  # prepares the import of torch's tests
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def samples(info: Any, training: bool) -> Iterator[Sample]:
    """Yield the first samples of a module."""
    given = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
    )
    for number, each in enumerate(given[:FIRST]):

        def make(parts: Any = each.constructor_input) -> torch.nn.Module:
            torch.manual_seed(0)
            made: torch.nn.Module = info.module_cls(*parts.args, **parts.kwargs)
            return copy.deepcopy(made).train(training)

        if each.forward_input is not None:
            name = f"{info.name}[{number}] {'training' if training else 'evaluation'}"
            yield Sample(name, make, each.forward_input.args, each.forward_input.kwargs)


def trained(sample: Sample, how: Callable[[Any], Any]) -> list[Any]:
    """Return losses of some steps, and parameters and buffers then."""
    module = sample.make()
    parameters = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None

    def step(args: Any, kwargs: Any) -> Any:
        if optimizer is not None:
            optimizer.zero_grad()
        made = [leaf for leaf in flatten(module(*args, **kwargs)) if torch.is_tensor(leaf)]
        numbers = [leaf for leaf in made if leaf.is_floating_point()]
        loss = torch.stack([leaf.float().square().mean() for leaf in numbers]).sum()
        if loss.requires_grad:
            loss.backward()
            if optimizer is not None:
                optimizer.step()
        return loss

    run = how(step)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        losses.append(run(*copy.deepcopy((sample.args, sample.kwargs))).detach())
    state = module.state_dict()
    return [*losses, *(state[name] for name in sorted(state))]


def differences(
    given: list[Any],
    how: Callable[[Any], Any],
    equal: Callable[[Any, Any], bool],
    most: int = FIRST,
) -> dict[str, str]:
    """Return how samples differ from eager mode, or why they are refused, by name."""
    found = {}
    for info in given:
        for sample in (s for mode in (True, False) for s in islice(samples(info, mode), most)):
            try:
                expected = trained(sample, lambda step: step)
            except RuntimeError:  # lazy modules, and what cannot be trained so
                continue
            try:
                made = trained(sample, how)
            except asc.CaptureError as error:
                found[sample.name] = f"refused: {error}"
                continue
            if not all(map(equal, made, expected)):
                found[sample.name] = "other results"
    return found


def unexpected(found: dict[str, str]) -> dict[str, str]:
    """Return all but the modules that read numbers, which are refused for that."""
    reasons = LOOK | AVERAGES
    return {
        name: said
        for name, said in found.items()
        if reasons.get(name.partition("[")[0], "nothing") not in said
    }


def bits(made: Any, expected: Any) -> bool:
    return bool(torch.equal(made.nan_to_num(), expected.nan_to_num()))


def close(made: Any, expected: Any) -> bool:
    return bool(torch.allclose(made, expected, rtol=2e-3, atol=2e-4, equal_nan=True))


def captured(step: Any) -> Any:
    return asc.compile(step, asc.Machine.emulated(gpus=2), backend="host")


def test_some_modules_are_trained_as_in_eager_mode() -> None:
    given = modules()
    assert unexpected(differences(given[::EACH], captured, bits, 1)) == {}
    assert len(given) > 100


def test_modules_that_read_numbers_are_refused_for_that() -> None:
    given = [info for info in modules() if info.name in LOOK]
    found = differences(given, captured, bits, 1)
    assert {name.partition("[")[0] for name in found} == LOOK.keys()
    assert unexpected(found) == {}


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_modules_are_trained_as_in_eager_mode(piece: int) -> None:
    assert unexpected(differences(modules()[piece::PIECES], captured, bits)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_modules_are_trained_by_fused_steps_as_in_eager_mode(piece: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compiled kernels differ")
        found = differences(
            modules()[piece::PIECES], lambda step: asc.compile(step, fuse=True), close
        )
    assert unexpected(found) == {}
