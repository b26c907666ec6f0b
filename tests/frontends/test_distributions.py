"""Distributions of torch are captured: with the same numbers, and without the validation that reads elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch import distributions as dist

import autosched as asc
from tests.serial import some

X = torch.linspace(0.5, 1.5, 12).view(4, 3)
BY_LOGITS = (
    "Bernoulli Categorical ContinuousBernoulli Geometric OneHotCategorical "
    "OneHotCategoricalStraightThrough"
).split()
BY_ONE = "Chi2 Dirichlet Exponential HalfCauchy HalfNormal Poisson StudentT".split()
OTHERS: dict[str, Callable[[Tensor], dist.Distribution]] = {
    "Binomial": lambda x: dist.Binomial(5, logits=x),
    "GeneralizedPareto": lambda x: dist.GeneralizedPareto(x, x, x),
    "Independent": lambda x: dist.Independent(dist.Normal(x, x), 1),
    "LKJCholesky": lambda x: dist.LKJCholesky(3, x),
    "LowRankMultivariateNormal": lambda x: dist.LowRankMultivariateNormal(x, x[..., None], x),
    "MixtureSameFamily": lambda x: dist.MixtureSameFamily(
        dist.Categorical(logits=x), dist.Normal(x, x)
    ),
    "Multinomial": lambda x: dist.Multinomial(5, logits=x),
    "MultivariateNormal": lambda x: dist.MultivariateNormal(x, scale_tril=torch.diag_embed(x)),
    "NegativeBinomial": lambda x: dist.NegativeBinomial(x, logits=x),
    "RelaxedBernoulli": lambda x: dist.RelaxedBernoulli(x.new_ones(()), logits=x),
    "RelaxedOneHotCategorical": lambda x: dist.RelaxedOneHotCategorical(x.new_ones(()), logits=x),
    "TransformedDistribution": lambda x: dist.TransformedDistribution(
        dist.Normal(x, x), [dist.TanhTransform(cache_size=1)]
    ),
    "Uniform": lambda x: dist.Uniform(-x, x),
}
REFUSED = {
    "VonMises": lambda x: dist.VonMises(x, x),
    "Wishart": lambda x: dist.Wishart(x[:, 0] + 3, torch.eye(3)),
}
KINDS = [
    name
    for name, kind in vars(dist).items()
    if isinstance(kind, type) and issubclass(kind, dist.Distribution) and name not in REFUSED
    if name not in ("Distribution", "ExponentialFamily")
]


def made(name: str, x: Tensor) -> dist.Distribution:
    if name in OTHERS:
        return OTHERS[name](x)
    kind = getattr(dist, name)
    if name in BY_LOGITS:
        return kind(logits=x)
    return kind(x) if name in BY_ONE else kind(x, x)


@pytest.mark.parametrize("name", some(KINDS, "Normal", "Categorical", "TransformedDistribution"))
def test_a_distribution_draws_and_weighs_as_it_does_eagerly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.Distribution, "_validate_args", True)  # Dynamo leaves it off

    def step(x: Tensor) -> Tensor:
        distribution = made(name, x)
        drawn = distribution.rsample() if distribution.has_rsample else distribution.sample()
        return distribution.log_prob(drawn)

    torch.manual_seed(0)
    expected = step(X)
    graph = asc.capture(step, X)
    torch.manual_seed(0)
    assert torch.equal(graph.run_serial(**graph.feed(X))["result"], expected)
    with pytest.raises(ValueError, match="to satisfy the constraint"):  # it validates again
        dist.Normal(X, -X)


@pytest.mark.parametrize("name", REFUSED)
def test_distributions_that_read_elements_are_named(name: str) -> None:
    with pytest.raises(asc.CaptureError, match=f"{name} .*; use it outside of the step"):
        asc.capture(lambda x: REFUSED[name](x).sample(), X)


def test_validation_that_is_asked_for_is_refused() -> None:
    with pytest.raises(asc.CaptureError, match="leave out validate_args=True"):
        asc.capture(lambda x: dist.Normal(x, x, validate_args=True).log_prob(x), X)
