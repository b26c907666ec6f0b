"""The benchmark for GPUs, as far as it goes without one: its networks are whole, its code runs, its records last."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from autosched.simulated_gpus import playing
from tests.benchmarks.conftest import FOLDER

# ---- rivals


def test_the_graph_of_a_rival_outlives_the_workspaces_of_the_process(bench):
    """torch.compile releases them, and cached memory, before it records."""
    with playing(seed=1) as gpus, torch.no_grad():
        model, x = torch.nn.Linear(4, 3).to("cuda"), torch.rand(2, 4, device="cuda")
        entry = bench.contestants.cuda_graph(SimpleNamespace(cuda=True), model, x)
        expected = model(x).tolist()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert entry.call().tolist() == expected
        assert not gpus.faults


# ---- a rehearsal


@pytest.mark.slow
def test_a_rehearsal_runs_all_of_it_and_leaves_out_only_what_needs_cuda(bench, capsys):
    assert bench.main(["--rehearse"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("(a rehearsal: times mean nothing)") == len(bench.script["REPORTS"])
    assert "autosched" in printed
    assert "failed" not in printed
    assert "NOT" not in printed


# ---- code by hand


@pytest.mark.parametrize("seed", range(4))
def test_code_by_hand_is_right_in_whatever_order_streams_go_on(bench, seed):
    """Twice, as the second call uses the first one's buffers; and ``playing`` sees memory that goes back too early.

    The caller's stream sleeps, so that who does not wait for it comes first.
    """
    with playing(gpus=1, seed=seed):
        rig = bench.script["Rig"](rehearse=True)
        x = torch.arange(4.0).reshape(2, 2)
        products = bench.by_hand.ProductsAndCopies(rig, x.to(rig.device), 3)
        assert [copy.tolist() for _ in range(2) for copy in products()] == [x.mm(x).tolist()] * 6
        weights = [(torch.eye(2).roll(i, 0) + i).pin_memory() for i in range(5)]
        streamed, wanted = bench.by_hand.StreamedWeights(rig, weights, buffers=2), x
        for weight in weights:
            wanted = wanted @ weight
        there = x.to(rig.device)
        torch.cuda._sleep(1)
        found = [streamed(there) for _ in range(2)]
        assert [one.tolist() for one in found] == [wanted.tolist()] * 2
        lanes = bench.by_hand.Lanes(rig, lanes=3, blocks=3, block=2)
        for _ in range(2):
            one = torch.zeros(2, device=rig.device)
            torch.cuda._sleep(1)
            one += 1
            assert [end.tolist() for end in lanes(one, one)] == [[15.0, 15.0]] * 3


def test_on_a_played_gpu_ours_take_part_replayed_and_wait_no_more_than_code_by_hand(
    bench, monkeypatch
):
    issue = sys.modules["issue"]
    monkeypatch.setattr(issue, "BLOCKS", 3)
    monkeypatch.setattr(issue, "BLOCK", 2)
    with playing(gpus=1, seed=1):
        (measure,) = issue.cases(bench.script["Rig"](rehearse=True)).values()
        case = measure()
    assert list(case.seconds) == ["by hand", "generated code", "autosched", "autosched, replay"]
    assert case.notes["waits, autosched"] == case.notes["waits, by hand"]


# ---- records


def test_a_record_reads_back_and_keeps_cases_of_the_same_machine_alone(bench, tmp_path):
    promise, case = bench.record.Promise, bench.record.Case
    cases = {
        "a": case(
            {"x": 1.0}, [promise("x / y", 1.5, least=1.41)], {"z": "is not there"}, {"rows": 3}
        )
    }
    bench.record.write_json(tmp_path / "r.json", "Title", cases, {"GPU": "one"})
    assert bench.record.read_json(tmp_path / "r.json") == ("Title", cases, {"GPU": "one"})
    assert bench.record.earlier(tmp_path / "r.json", {"GPU": "one"}) == cases
    assert bench.record.earlier(tmp_path / "r.json", {"GPU": "another"}) == {}


# ---- which rule is kept where


def test_what_the_table_of_rules_names_is_there():
    root = FOLDER.parent.parent
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    where = [
        row.split("|")[2]
        for row in text[text.index("# The rules of CUDA") :].splitlines()
        if row.startswith("| ")
    ]
    found = 0
    for file, names in re.findall(r"`([\w/]+\.py|[\w/]+/)`((?:, `\w+`)*)", " ; ".join(where)):
        path = next(
            (path for path in (root / "autosched" / file, root / file) if path.exists()), None
        )
        assert path is not None, file
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b(def|class) {name}\b", path.read_text(encoding="utf-8")), (
                f"{file}: {name}"
            )
            found += 1
    assert found > 60
