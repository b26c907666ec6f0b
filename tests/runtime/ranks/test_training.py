"""Training on several processes: on all ranks bit for bit what one process makes of it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosched as asc
from tests.runtime.ranks import training_jobs as jobs
from tests.serial import assert_equal, some, train

SPLIT = jobs.HALVES
REPLICAS = {"replicas": 2, "chunks": 2, "schedule": "1f1b", "reduction": "exchange"}
EVEN, STAGES = [[4, 4], [4, 4], [4, 4]], [[8, 8], [8, 8], [8, 8]]


def pipeline(order: str, **options: Any) -> dict[str, Any]:
    return {"chunks": 2, "schedule": order, **options}


# With the first steps of optimizers that make a state then, and a rate that changes. Ragged batches
# leave ranks without rows.
CASES = {
    "2 ragged ranks": ("data_parallel", {"reduction": "exchange"}, [[4, 4], [4, 4], [3, 5]]),
    "3 ragged ranks": ("data_parallel", {"reduction": "exchange"}, [[4] * 3, [0, 4, 5], [5, 4, 0]]),
    "clip": ("data_parallel", {"reduction": "sum", "clip_grad_norm": 0.05}, EVEN),
    "accumulate": ("data_parallel", {"accumulate": 2, "reduction": "sum"}, EVEN),
    "half": ("data_parallel", {"compression": "half"}, EVEN),
    "dropout": ("data_parallel", {"dropout": True, "reduction": "sum"}, EVEN),
    "1f1b": ("pipeline", pipeline("1f1b", clip_grad_norm=0.1), STAGES),
    "zb-v": ("pipeline", pipeline("zb-v", clip_grad_norm=0.1), STAGES),
    "gpipe, dropout": ("pipeline", pipeline("gpipe", split=SPLIT, dropout=True), STAGES),
    "interleaved, dropout": (
        "pipeline",
        pipeline(
            "interleaved",
            split={"0": "cpu:0", "1": "cpu:1", "[23]": "cpu:0", "4": "cpu:1"},
            dropout=True,
        ),
        STAGES,
    ),
    "model parallel": ("model_parallel", {"split": SPLIT, "optimizer": "momentum"}, STAGES),
    "replicas without rows": (
        "pipeline",
        {**REPLICAS, "dropout": True, "optimizer": "momentum"},
        [[8] * 4, [1] * 4, [8] * 4],
    ),
}
QUICK = ["3 ragged ranks", "clip", "half", "gpipe, dropout"]
IN_PLAIN_TORCH = ["2 ragged ranks", "3 ragged ranks", "clip"]


def serial(options: dict[str, Any], rows: list[list[int]]) -> Any:
    """Train on the shares of all ranks, one after another."""
    norms: list[Any] = []

    def clip(model: nn.Module) -> object:
        most = options.get("clip_grad_norm")
        if most is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), most))
        return norms

    model = jobs.a_model()
    optimizer = jobs.OPTIMIZERS["adam"](model.parameters())
    scheduler = jobs.halved(optimizer)
    losses = []
    for number, counts in enumerate(rows):
        shares = [[n] if n else [] for n in counts]
        batch = jobs.whole(number, counts)
        losses.append(
            train(model, functional.cross_entropy, optimizer, batch, shares, before_step=clip)
        )
        scheduler.step()
    found = [*zip(losses, norms or [None] * len(losses), strict=True)]
    return found, dict(model.state_dict()), optimizer.state_dict()["state"]


def assert_same(found: list[Any], expected: Any) -> None:
    for rank, one in enumerate(found):
        assert_equal(one, expected, f"rank {rank}")


@pytest.mark.parametrize("case", some(CASES, *QUICK))
def test_ranks_equal_one_process(ranks, case):
    """That trains in plain PyTorch, or plays all ranks, which is what the tests of training hold to."""
    way, options, rows = CASES[case]
    options = {"optimizer": "adam", **options}
    size = len(rows[0])
    plain = case in IN_PLAIN_TORCH
    expected = serial(options, rows) if plain else jobs.train(way, options, rows, size)
    assert_same(ranks.run(jobs.train, size, way, options, rows), expected)


def test_each_rank_draws_from_its_own_generator(ranks):
    model = jobs.a_model(dropout=True)
    optimizer = jobs.OPTIMIZERS["sgd"](model.parameters())
    scheduler = jobs.halved(optimizer)
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
            scheduler.step()
            losses.append((total, None))
    options = {"dropout": True, "optimizer": "sgd", "reduction": "sum", "seeds": [0, 1]}
    for found, state, _ in ranks.run(jobs.train, 2, "data_parallel", options, EVEN):
        assert_equal((found, state), (losses, dict(model.state_dict())), "losses and model")


# ---- ranks that differ


DIFFERENT = {
    "dtype": "rank 1:  item 0 of the batch is a tensor of float64 (rows, 8) on cpu",
    "item": "rank 0:  a batch of 2 items\n    rank 1:  a batch of 1 items",
    "rows": "tensors of a batch need one first dimension, of 0 or more, to be cut along; got",
    "mode": "rank 1:  model and loss in state 1",
    "rate": "rank 0:  an optimizer with lr = 0.1 in group 0\n    rank 1:  an optimizer with lr",
    "frozen": "rank 1:  a model of 2 parameters, of which [1] are frozen",
    "capture": "ValueError: of a test",
}


def test_a_step_in_which_ranks_differ_raises_on_all_and_the_next_ones_run(ranks):
    """What a rank changes, or drops, is undone by the state of rank 0; for what it drops all plan again."""
    names = ["before"]
    for what in (*DIFFERENT, "changed", "closed"):
        names += [what, f"after {what}"]
    states = []
    for name, *ended in zip(names, *ranks.run(jobs.misuse, 2, names), strict=True):
        if name in DIFFERENT:
            assert [text for text in ended if DIFFERENT[name] not in text] == [], name
        else:
            assert ended[0] == ended[1], name
            states.append(ended[0])
    assert all(text.startswith("[") for text in states)
    assert len({*states}) == len(states) == len(DIFFERENT) + 5


@pytest.mark.parametrize("what", ["nan", "inputs", "interrupt"])
def test_a_step_that_fails_on_a_rank_when_all_have_begun_ends_all_ranks(ranks, what):
    message = "nterrupt" if what == "interrupt" else "ValueError: of a test"
    for ended in ranks.run(jobs.misuse, 2, ["before", what, "after", "later"]):
        assert ended[0].startswith("[")
        assert message in ended[1]
        assert all("RankError: a run failed before" in text for text in ended[2:])


# ---- stages


def test_changes_between_steps_count_as_in_one_process(ranks):
    """Of parameters, moments, buffers, rates, modes, groups; also where a state is loaded."""
    assert_same(ranks.run(jobs.change_everything, 2), jobs.change_everything(2))


def test_what_cannot_span_ranks_is_refused_on_all_of_them(ranks):
    for rows, in_flight, step, state in ranks.run(jobs.refuse, 2):
        assert rows.startswith(
            "ScheduleError: rank 1 passes 9 rows, and rank 0 8; all ranks of such"
        )
        assert "in_flight= of pipeline is for one process" in in_flight
        assert not step
        assert "call collect() on all ranks before state_dict()" in state


@pytest.mark.parametrize("size", some([2, 4], 4))
def test_a_checkpoint_of_stages_is_loaded_on_two_ranks_and_in_one_process(ranks, tmp_path, size):
    stages = {"schedule": "1f1b", "chunks": 2, "split": jobs.HALVES}
    how = stages if size == 2 else REPLICAS
    found = ranks.run(jobs.save, size, "pipeline", how, str(tmp_path))
    here = asc.Machine.emulated(gpus=0, hosts=2)
    with jobs.step_on(here, "pipeline", stages, seed=1) as step:
        step.load(tmp_path)
        assert_equal(jobs.facts(step), found[0][1:], "in one process")
    loaded = ranks.run(jobs.load, 2, "pipeline", stages, str(tmp_path))
    for rank, (loss, *state) in enumerate(loaded):
        assert_equal(state, found[0][1:], f"rank {rank}")
        assert size == 4 or torch.equal(loss, found[0][0])
