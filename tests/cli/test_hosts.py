"""Clusters on the command line."""

from __future__ import annotations

import pytest

from autosched.cli import main

THING = "autosched.demo:averaged_example"
FAST = ("--policy", "heft")


def shown(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_show_groups_rows_by_host(capsys):
    text = shown(capsys, "show", THING, "--hosts", "2", "--gpus", "0", "--policy", "round_robin")
    lines = text.splitlines()
    assert [line for line in lines if line in ("host 0", "host 1")] == ["host 0", "host 1"]
    assert "rank 1 has cpu:1" in lines


def test_a_network_alone_asks_for_two_hosts(capsys):
    text = shown(capsys, "show", THING, "--network", "infiniband400", "--gpus", "0", *FAST)
    assert "rank 1 has cpu:1" in text.splitlines()


def test_compare_hosts(capsys):
    text = shown(capsys, "compare", THING, "--hosts", "1", "2", "--gpus", "1", "--policies", "heft")
    assert "1 host with 1 GPU, pcie4 and ethernet100" in text
    assert "2 hosts with 2 CPUs and 2 GPUs, ethernet100" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "0"), "must be from 1 to 4096, got 0"),
        (("--hosts", "2", "--local"), "--hosts or --network and --local name different machines"),
    ],
)
def test_messages(arguments, message, capsys):
    try:
        code = main(("show", THING, *arguments))
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
