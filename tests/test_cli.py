"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

import autosched
from autosched import cli, demo


def test_version():
    command = [sys.executable, "-m", "autosched", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        == f"autosched {autosched.__version__}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["sing"], "invalid choice: 'sing'"),
        (["demo", "--epochs", "0"], "argument --epochs: must be 1 or more, got 0"),
        (["demo", "--epochs", "many"], "argument --epochs: invalid"),
        (["demo", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_usage_is_told_and_exits_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_demo_trains_compares_measures_and_draws(tmp_path, capsys):
    """One epoch is not enough for an accuracy of 0.95, which the exit code asks for; all else is as in the full run."""
    code = cli.main(["demo", "--epochs", "1", "--folder", str(tmp_path / "new")])
    said, complaints = capsys.readouterr()
    assert complaints == ""
    starts = [
        "machine: ",
        "    cpu: ",
        "<Schedule of 'two-layer MLP': ",
        "its program begins:",
        "epoch  1: loss ",
        "one step",
    ]
    starts += [
        f"    {label} "
        for label in ("predicted makespan", "measured makespan", "serial", "lower bound", "copies hidden")
    ]
    lines = said.splitlines()
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    assert "    cuda:0/copy-in " in said
    assert "equal to serial: bit for bit (56,832 weights after 10 steps)" in lines
    accuracy = float(next(line for line in lines if line.startswith("epoch  1")).split()[-1])
    assert code == (0 if accuracy > 0.95 else 1)
    assert accuracy > 0.5
    for name in ("mlp.svg", "mlp_graph.svg"):
        root = ElementTree.fromstring((tmp_path / "new" / name).read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "h.0" in "".join(root.itertext())


def test_a_demo_that_differs_from_the_serial_run_names_the_weights_and_fails(tmp_path, capsys, monkeypatch):
    initial_weights, calls = demo.initial_weights, []

    def a_little_off_the_second_time(*arguments):
        weights = initial_weights(*arguments)
        weights["w2"] += 1e-6 * len(calls)
        calls.append(arguments)
        return weights

    monkeypatch.setattr(demo, "initial_weights", a_little_off_the_second_time)
    monkeypatch.setattr(demo, "_batches", lambda *_: [])
    monkeypatch.setattr(demo, "_report", lambda *_: None)
    assert demo.main(folder=tmp_path) == 1
    assert "\nNOT equal to serial after 120 steps: w2\n" in capsys.readouterr().out


def test_errors_are_told_in_a_line_and_exit_with_2(monkeypatch, capsys, tmp_path):
    def refuse(epochs, folder):
        raise autosched.MachineError("no such machine")

    monkeypatch.setattr(demo, "main", refuse)
    assert cli.main(["demo", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "autosched: no such machine\n"


def test_a_folder_that_cannot_be_made_exits_with_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--folder", str(tmp_path / "file" / "below")]) == 2
    assert capsys.readouterr().err.startswith("autosched: ")


def test_control_c_exits_with_130(monkeypatch, tmp_path):
    def interrupt(epochs, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "main", interrupt)
    assert cli.main(["demo", "--folder", str(tmp_path)]) == 130
