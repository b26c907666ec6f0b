"""Regions against the elements that torch's views really see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autosched.graph.regions import Accesses, Frames, Region, RegionIndex

whole = st.none() | st.integers(-7, 7)
keys = st.one_of(
    st.integers(-7, 7),
    st.none(),
    st.just(...),
    st.builds(slice, whole, whole, st.none() | st.integers(1, 3)),
)
dims = st.integers(-3, 3)

# A view of a tensor: torch's method, and its arguments.
moves = st.one_of(
    st.tuples(st.just("__getitem__"), st.tuples(keys)),
    st.tuples(st.just("__getitem__"), st.tuples(st.lists(keys, min_size=1, max_size=4).map(tuple))),
    st.tuples(st.just("select"), st.tuples(dims, st.integers(-6, 6))),
    st.tuples(st.just("narrow"), st.tuples(dims, st.integers(-3, 4), st.integers(0, 4))),
    st.tuples(st.sampled_from(["transpose", "swapaxes"]), st.tuples(dims, dims)),
    st.tuples(st.sampled_from(["t", "detach", "ravel", "unsqueeze_", "squeeze"]), st.just(())),
    st.tuples(st.just("unsqueeze"), st.tuples(dims)),
    st.tuples(st.just("reshape"), st.tuples(st.just(-1))),
    st.tuples(st.just("view"), st.tuples(st.integers(1, 3), st.just(-1))),
    st.tuples(st.just("permute"), st.permutations([0, 1, 2]).map(tuple)),
    st.tuples(st.just("expand"), st.tuples(st.just(2), st.just(-1), st.just(-1))),
    st.tuples(st.just("unfold"), st.tuples(st.just(0), st.just(2), st.just(1))),
    st.tuples(
        st.sampled_from(["chunk", "split", "tensor_split"]),
        st.tuples(st.integers(1, 3), st.integers(0, 1)),
    ),
    st.tuples(
        st.just("tensor_split"), st.tuples(st.lists(st.integers(-4, 5), min_size=1, max_size=3))
    ),
    st.tuples(st.just("as_strided"), st.tuples(st.just((2,)), st.just((1,)), st.integers(0, 4))),
    st.tuples(st.just("unbind"), st.tuples(st.integers(0, 1))),
)
shapes = st.lists(st.integers(0, 6), min_size=1, max_size=3)


def elements(view: Any) -> set[int]:
    if isinstance(view, (tuple, list)):
        return set().union(*map(elements, view))
    return set(view.reshape(-1).tolist())


def walk(
    frames: Frames, root: Region, tensor: torch.Tensor, chain: list[Any]
) -> tuple[Region, Any]:
    """Follow a chain of views as far as torch does, and as far as memory is shared."""
    region, view = root, tensor
    for name, args in chain:
        if isinstance(view, (tuple, list)) and name != "__getitem__":
            break
        try:
            seen = getattr(view, name)(*args)
        except (IndexError, RuntimeError, TypeError, ValueError):
            break
        region, view = frames.view(region, name, args, {}), seen
    return region, view


@given(shape=shapes, chains=st.lists(st.lists(moves, max_size=4), min_size=2, max_size=4))
def test_disjoint_regions_share_no_element(shape: list[int], chains: list[list[Any]]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    frames = Frames()
    root = frames.root()
    seen = [walk(frames, root, tensor, chain) for chain in chains]
    for a, one in seen:
        for b, other in seen:
            if not a.overlaps(b):
                assert not elements(one) & elements(other)
                assert not b.overlaps(a)
            if a.covers(b):
                assert all(c.overlaps(a) for c, _ in seen if c.overlaps(b))


@given(
    shape=shapes,
    chain=st.lists(moves, max_size=4),
    more=st.lists(moves, max_size=2),
    others=st.lists(moves, max_size=2),
)
def test_disjoint_regions_of_a_view_share_no_element(
    shape: list[int], chain: list[Any], more: list[Any], others: list[Any]
) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    frames = Frames()
    root = frames.root()
    (a, one), (b, other) = (walk(frames, root, tensor, chain + rest) for rest in (more, others))
    if not a.overlaps(b):
        assert not elements(one) & elements(other)


def region(text: str) -> Region:
    return eval(text, {"x": Expression(FRAMES, ROOT)}).region


class Expression:
    """Python's own notation for a chain of views."""

    def __init__(self, frames: Frames, region: Region):
        self.frames, self.region = frames, region

    def __getitem__(self, key: Any) -> Expression:
        return Expression(self.frames, self.frames.item(self.region, key))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Expression(
            self.frames, self.frames.view(self.region, name, args, kwargs)
        )


FRAMES = Frames()
ROOT = FRAMES.root()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x[:4]", "x[4:]"),
        ("x[0]", "x[1]"),
        ("x[1:-1]", "x[0]"),
        ("x[1:-1]", "x[-1]"),
        ("x[-3:-2]", "x[-1]"),
        ("x[::2]", "x[1::2]"),
        ("x[1:][::3]", "x[::3]"),
        ("x[:, :2]", "x[:, 2:]"),
        ("x[:, :2]", "x.t()[2:]"),
        ("x.t()[1:3]", "x[:, 4:]"),
        ("x.transpose(0, 2)[0]", "x[:, :, 1]"),
        ("x[2:8][1:3]", "x[5:]"),
        ("x[2:8][1:3]", "x[:3]"),
        ("x[..., 0]", "x[..., 1:]"),
        ("x[3:, ..., 0]", "x[:3]"),
        ("x[3:, ..., 0:1]", "x[3:, ..., 1:2]"),
        ("x[None, :2]", "x[2:][None]"),
        ("x.chunk(3)[0]", "x.chunk(3)[2]"),
        ("x.view(4, 5)[0]", "x.view(4, 5)[1]"),
        ("x[:4].view(-1)[2:]", "x[4:].reshape(7)"),
        ("x.T()[:2]", "x.T()[2:]"),
        ("x.narrow(0, 2, 3)", "x.select(0, 5)"),
        ("x.narrow(-1, 2, 3)", "x.select(-1, 5)"),
        ("x[5][:2]", "x[5, 2:]"),
        ("x.detach()[0]", "x[1]"),
    ],
)
def test_these_are_disjoint(a: str, b: str) -> None:
    assert not region(a).overlaps(region(b))
    assert not region(b).overlaps(region(a))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x[:5]", "x[4:]"),
        ("x[:4]", "x[-4:]"),
        ("x[0]", "x[-1]"),
        ("x[::2]", "x[1::3]"),
        ("x[:4]", "x.t()[4:]"),
        ("x.expand(3, 4)[0]", "x.expand(3, 4)[1]"),
        ("x.unfold(0, 2, 1)[0]", "x.unfold(0, 2, 1)[1]"),
        ("x.as_strided((2, 2), (1, 1))[0]", "x.as_strided((2, 2), (1, 1))[1]"),
        ("x[0].as_strided((9,), (1,), 0)", "x[1]"),
        ("x.tensor_split((3, 1))[0]", "x.tensor_split((3, 1))[2]"),
        (
            "x.tensor_split(tensor_indices_or_sections=[3, 1])[0]",
            "x.tensor_split(tensor_indices_or_sections=[3, 1])[2]",
        ),
        ("x.view(4, 5)[0]", "x[1]"),
        ("x[2:8][:-1]", "x[6]"),
        ("x", "x[3]"),
        ("x.T()[0]", "x[:, 1]"),
    ],
)
def test_these_may_overlap(a: str, b: str) -> None:
    assert region(a).overlaps(region(b))
    assert region(b).overlaps(region(a))


@pytest.mark.parametrize(
    ("a", "b"), [("x", "x[1]"), ("x[:4]", "x[1:3]"), ("x[:4]", "x[2, 5]"), ("x[::2]", "x[2::4]")]
)
def test_a_region_covers_smaller_regions(a: str, b: str) -> None:
    assert region(a).covers(region(b))
    assert not region(b).covers(region(a))


accesses = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 9), st.integers(1, 4), st.sampled_from([False] * 9 + [True])
    ),
    max_size=40,
)


@given(accesses)
def test_accesses_order_what_conflicts_directly_or_through_others(
    drawn: list[tuple[bool, int, int, bool]],
) -> None:
    """Against all pairs: who must come after whom is the same, once what follows from the rest is added."""
    frames, found = Frames(), Accesses()
    x = frames.root()
    regions = [x if all_ else frames.item(x, slice(a, a + n)) for _, a, n, all_ in drawn]
    reached: list[set[int]] = []
    for i, (writes, *_) in enumerate(drawn):
        before = (
            [w for ws in found.write(regions[i], i) for w in ws]
            if writes
            else found.read(regions[i], i)
        )
        reached.append(set(before).union(*(reached[j] for j in before)))
    for i, (writes, *_) in enumerate(drawn):
        for j in range(i):
            conflict = (writes or drawn[j][0]) and regions[i].overlaps(regions[j])
            assert not conflict or j in reached[i]
        assert all(any(regions[i].overlaps(regions[j]) for j in reached[i]) for _ in reached[i])


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.booleans()), max_size=30))
def test_an_index_finds_all_that_overlaps(drawn: list[tuple[int, int, bool]]) -> None:
    frames, index = Frames(), RegionIndex[int]()
    x = frames.root()
    regions = [
        frames.item(x, slice(a, b) if rows else (slice(None), slice(a, b))) for a, b, rows in drawn
    ]
    for i, made in enumerate(regions):
        index.setdefault(made, i)
    for asked in (x, *regions):
        assert {found for found, _ in index.overlapping(asked)} == {
            p for p in regions if p.overlaps(asked)
        }
