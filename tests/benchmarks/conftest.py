"""The modules of the benchmark for GPUs, which are no package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="session")
def bench():
    """The modules, by the names that they call each other by; and the names of the script."""
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    try:
        script = runpy.run_path(str(FOLDER / "__main__.py"), run_name="gpu")
        import _record
        import by_hand
        import contestants
        import networks
        import probes
        import sequence
    finally:
        sys.path[:] = [path for path in sys.path if path not in (str(FOLDER), str(FOLDER.parent))]
    return SimpleNamespace(
        script=script, main=script["main"], rig=script["Rig"], record=_record, by_hand=by_hand,
        contestants=contestants, networks=networks, probes=probes, sequence=sequence,
    )  # fmt: skip
