"""Read and write a file of earlier measurements.

The file belongs to one machine, driver and version of torch, and is used only if a caller asks for
it. A file that is malformed, or of another machine, is reported and replaced. Knows no task:
readings have names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from autosched._lib import json_reader
from autosched._lib.files import write
from autosched.errors import ScheduleError, shown
from autosched.machine.machine import Device

__all__ = ["Kept", "model", "real", "user_folder"]

Pair = tuple[float, float]


class Kept:
    """Pairs of numbers by name, read from a file and written to it by ``save``.

    Without a folder nothing is stored.

    ``cache`` is a folder, or True for the user's own.
    """

    def __init__(self, cache: bool | str | os.PathLike[str] | None) -> None:
        self.path: Path | None = None
        self.pairs: dict[str, Pair] = {}
        self._changed = False
        if cache is None or cache is False:
            return
        if cache is not True and not isinstance(cache, (str, os.PathLike)):
            raise ScheduleError(
                f"cache must be a folder, True for the user's own, or None, got {shown(cache)}"
            )
        folder = user_folder() if cache is True else Path(cache)
        text = json.dumps(hardware(), sort_keys=True)
        self.path = folder / f"measured-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if self.path.exists():
            try:
                self.pairs = _read(self.path)
            except (OSError, ScheduleError, UnicodeDecodeError) as error:
                warnings.warn(
                    f"{self.path} is not used, all is measured anew: {error}", stacklevel=4
                )

    def get(self, *name: str | None) -> Pair | None:
        """Return the pair of a name, which may have parts.

        The result is None if there is no such pair, or a part has no name.
        """
        return None if None in name else self.pairs.get(" ".join(map(str, name)))

    def put(self, pair: Pair, *name: str | None) -> None:
        """Store a pair under a name, unless it is not a pair of times."""
        if (
            self.path is not None
            and None not in name
            and all(0 <= number < math.inf for number in pair)
        ):
            key = " ".join(map(str, name))
            self._changed |= self.pairs.get(key) != pair
            self.pairs[key] = pair

    def save(self) -> None:
        """Write the file atomically; warn if it cannot be written."""
        if self.path is None or not self._changed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError, ScheduleError, UnicodeDecodeError):
                self.pairs = _read(self.path) | self.pairs  # of another process, meanwhile
            write(
                self.path,
                json.dumps({"machine": hardware(), "readings": self.pairs}, indent=1) + "\n",
            )
        except OSError as error:
            warnings.warn(f"what was measured is not kept: {error}", stacklevel=4)


def user_folder() -> Path:
    """Return the folder for this user's caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "autosched"


def real(device: Device) -> torch.device:
    """Return the torch device of a device, with its index."""
    made = torch.device(device.physical or device.name)
    return torch.device("cpu") if made.type == "cpu" else torch.device(made.type, made.index or 0)


def model(device: torch.device) -> str:
    """Return the model name of a device, if torch or the system reports it."""
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device.type), "get_device_name", None)
        return str(name(device)) if name is not None else device.type
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"cpu, {torch.get_num_threads()} threads"


def hardware() -> dict[str, Any]:
    """Return what readings depend on: devices, number of CPU threads, driver and torch."""
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        devices += [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return {
        "devices": list(map(model, devices)),
        "driver": _first_line("/proc/driver/nvidia/version"),
        "torch": torch.__version__,
    }


def _first_line(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().partition("\n")[0]
    return ""


def _read(path: Path) -> dict[str, Pair]:
    """Return the pairs of a file.

    Raises OSError, UnicodeDecodeError, and ScheduleError for malformed contents.
    """
    found = json_reader.parse(path.read_text(encoding="utf-8"), _FILE)
    if found["machine"] != hardware():
        raise ScheduleError("it is of another machine, driver or torch")
    pairs: dict[str, Pair] = found["readings"]
    return pairs


def _pair(item: Any, place: str) -> Pair:
    numbers: tuple[float, ...] = json_reader.each(_seconds)(item, place)
    if len(numbers) != 2:
        json_reader.refuse(place, "a pair of numbers", item)
    return numbers[0], numbers[1]


_seconds = json_reader.number("a number, 0 or more", lambda number: number >= 0, infinite=False)
_anything = json_reader.one("an object", lambda item: isinstance(item, dict))
_FILE = json_reader.record(dict, {"machine": _anything, "readings": json_reader.table(_pair)})
