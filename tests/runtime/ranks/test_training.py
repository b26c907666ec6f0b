"""Training on several processes: on all ranks bit for bit what one process makes of the same shares."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import autosched as asc
from tests.runtime.ranks import training_jobs as jobs
from tests.serial import assert_equal, train


def serial(rows: list[list[int]], **options: Any) -> tuple[list[torch.Tensor], Any, Any]:
    """Train on the shares of all ranks, one after another."""
    model = jobs.normed()
    optimizer = optim.Adam(model.parameters(), 0.01)
    losses = []
    for number, counts in enumerate(rows):
        parts = [jobs.batch(number, rank, n) for rank, n in enumerate(counts)]
        whole = [torch.cat(items) for items in zip(*parts, strict=True)]
        shares = [[n] if n else [] for n in counts]
        losses.append(train(model, functional.cross_entropy, optimizer, whole, shares, **options))
    return losses, dict(model.state_dict()), optimizer.state_dict()["state"]


def assert_all_equal(found: list[Any], expected: Any) -> None:
    for rank, (losses, model, state) in enumerate(found):
        for number, pair in enumerate(zip(losses, expected[0], strict=True)):
            assert_equal(*pair, f"rank {rank}: loss {number}")
        assert_equal(model, expected[1], f"rank {rank}: model")
        assert_equal(state, expected[2], f"rank {rank}: optimizer")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([[4, 4], [4, 4], [3, 5]], marks=pytest.mark.slow),
        [[4, 4, 4], [5, 4, 0], [0, 4, 5]],
        pytest.param([[4] * 4, [4] * 4, [5, 0, 3, 4]], marks=pytest.mark.slow),
    ],
    ids=lambda rows: f"{len(rows[0])} ranks",
)
def test_ranks_equal_serial_training(ranks, rows):
    """With the first step of Adam, ragged batches, and a rank without rows."""
    found = ranks.run(jobs.train, len(rows[0]), rows, {"reduction": "exchange"})
    assert_all_equal(found, serial(rows))


def test_clipped_gradients_equal_serial_training(ranks):
    rows = [[4, 4], [4, 4]]
    found = ranks.run(jobs.train, 2, rows, {"reduction": "sum", "clip_grad_norm": 0.05})

    def clip(model: nn.Module) -> object:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    assert_all_equal(found, serial(rows, before_step=clip))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate": 2, "reduction": "sum"}, marks=pytest.mark.slow),
        {"compression": "half"},
        {"reduction": "library", "exact": False},
        pytest.param({"batch_norm": "synchronised"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_equal_those_of_emulated_hosts(ranks, options):
    """With a rate that changes."""
    rows = [[4, 4], [4, 4], [4, 4]]
    found = ranks.run(jobs.with_options, 2, rows, options)
    model = jobs.normed()
    optimizer = optim.Adam(model.parameters(), 0.01)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    machine = asc.Machine.emulated(gpus=0, hosts=2)
    losses = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, **jobs.known(options), backend="host"
    ) as step:
        for number, counts in enumerate(rows):
            parts = [jobs.batch(number, rank, n) for rank, n in enumerate(counts)]
            losses.append(step(*[torch.cat(items) for items in zip(*parts, strict=True)]))
            scheduler.step()
    assert_all_equal(found, (losses, dict(model.state_dict()), optimizer.state_dict()["state"]))


def test_the_library_leaves_the_same_bits_on_all_ranks(ranks):
    """Also after a step in which one of them had no rows."""
    rows = [[4, 4, 4], [5, 4, 0]]
    found = ranks.run(jobs.train, 3, rows, {"reduction": "library", "exact": False})
    assert_all_equal(found, found[0])
    for loss, exact in zip(found[0][0], serial(rows)[0], strict=True):
        torch.testing.assert_close(loss, exact)


@pytest.mark.parametrize(
    "options", [{"reduction": "gather"}, {"reduction": "library", "exact": False}], ids=str
)
def test_gradients_are_reduced_in_the_same_memory_at_each_step(ranks, options):
    for found in ranks.run(jobs.addresses, 2, 3, options):
        assert len(found) == 3
        assert found[0] == found[1] == found[2] != []


def test_each_rank_draws_from_its_own_generator(ranks):
    model = jobs.dropping()
    optimizer = optim.SGD(model.parameters(), 0.1)
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(2)]
    losses = []
    with torch.random.fork_rng():
        for number in range(3):
            total = torch.zeros(())
            for rank in range(2):
                torch.set_rng_state(states[rank])
                x, y = jobs.batch(number, rank, 4)
                loss = functional.cross_entropy(model(x), y) * 0.5
                loss.backward()
                states[rank] = torch.get_rng_state()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    for found, state in ranks.run(jobs.drop, 2, 3, [0, 1]):
        assert_equal(state, dict(model.state_dict()), "model")
        assert torch.stack(found).equal(torch.stack(losses))


def test_emulated_hosts_draw_as_ranks_that_are_seeded_alike(ranks):
    model = jobs.dropping()
    optimizer = optim.SGD(model.parameters(), 0.1)
    machine = asc.Machine.emulated(gpus=0, hosts=2)
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, reduction="sum", backend="host"
    ) as step:
        torch.manual_seed(3)
        losses = []
        for number in range(3):
            parts = [jobs.batch(number, rank, 4) for rank in range(2)]
            losses.append(step(*[torch.cat(items) for items in zip(*parts, strict=True)]))
    for found, state in ranks.run(jobs.drop, 2, 3, [3, 3]):
        assert_equal(state, dict(model.state_dict()), "model")
        assert_equal(found, losses, "losses")


# ---- ranks that differ


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "rank 1:  item 0 of the batch is a tensor of float64 (rows, 8) on cpu"),
        ("shape", "rank 1:  item 0 of the batch is a tensor of float32 (rows, 4) on cpu"),
        ("item", "rank 0:  a batch of 2 items\n    rank 1:  a batch of 1 items"),
        ("rows", "tensors of a batch need one first dimension, of 0 or more, to be cut along; got"),
        ("mode", "rank 1:  model and loss in state 1"),
        (
            "rate",
            "rank 0:  an optimizer with lr = 0.1 in group 0\n    rank 1:  an optimizer with lr = 0.2 in",
        ),
        ("frozen", "rank 1:  a model of 2 parameters, of which [1] are frozen"),
        ("capture", "ValueError: of a test"),
        ("key", "ValueError: of a test"),
    ],
)
def test_a_step_in_which_ranks_differ_raises_on_all_and_the_next_ones_run(ranks, what, message):
    first, second = ranks.run(jobs.misuse, 2, what)
    for ended in (first, second):
        assert message in ended[1]
        assert not ended[1].startswith("[")
    del first[1], second[1]
    assert first == second
    assert all(text.startswith("[") for text in first)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", "ValueError: of a test"),
        ("inputs", "ValueError: of a test"),
        ("interrupt", "nterrupt"),
    ],
)
def test_a_step_that_fails_on_a_rank_when_all_have_begun_ends_all_ranks(ranks, what, message):
    for ended in ranks.run(jobs.misuse, 2, what):
        assert ended[0].startswith("[")
        assert message in ended[1]
        assert all("RankError: a run failed before" in text for text in ended[2:])


@pytest.mark.parametrize("what", ["changed", "closed"])
def test_what_a_rank_changes_is_undone_by_the_state_of_rank_0(ranks, what):
    """Or what it drops: then all plan again."""
    first, second = ranks.run(jobs.misuse, 2, what)
    assert first == second
    assert len({*first}) == 4
