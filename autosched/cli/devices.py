"""``autosched devices`` lists torch's devices and the local machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosched.cli.options import gpus, read
from autosched.cli.output import deliver, json_text
from autosched.machine.machine import Machine

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "devices",
        help="show the devices that are here, and the links between them",
        description="Show what torch sees here, and the machine that schedules are made for with --local.",
        epilog="example: autosched devices --write machine.json && autosched show plan.json --machine machine.json",
    )
    parser.add_argument(
        "--gpus", type=gpus, metavar="N", help="use N of the GPUs; more than there are share them"
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="show this machine instead, measured perhaps"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write it as JSON, to be edited, for --machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(do=_devices)


def _devices(arguments: argparse.Namespace) -> int:
    here = _here()
    machine = (
        read(arguments.machine, Machine.from_json)
        if arguments.machine
        else Machine.local(arguments.gpus)
    )
    if arguments.write is not None:
        deliver(machine.to_json() + "\n", arguments.write)
    if arguments.json:
        shown = asdict(machine)
        for device in shown["devices"]:
            del device["imagined"]  # the machine contains it
        print(json_text({"here": here, "machine": shown}))
        return 0
    print(
        f"torch {here['torch']}: {here['threads']} CPU threads, {len(here['accelerators'])} accelerators"
    )
    for device in here["accelerators"]:
        print(f"  {device['device']}: {device['name']}, {device['nbytes'] / 2**30:.0f} GiB")
    print(f"\n{arguments.machine or 'Machine.local()'}:")
    print("\n".join(f"  {line}" for line in str(machine).splitlines()))
    if not arguments.machine:
        print("  rates are rough defaults; `autosched measure` measures")
    return 0


def _here() -> dict[str, Any]:
    import torch

    kind = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else ""
    module = getattr(torch, kind) if kind else None
    found = (
        [module.get_device_properties(i) for i in range(torch.accelerator.device_count())]
        if module
        else []
    )
    devices = [
        {"device": f"{kind}:{i}", "name": item.name, "nbytes": item.total_memory}
        for i, item in enumerate(found)
    ]
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "accelerators": devices}
