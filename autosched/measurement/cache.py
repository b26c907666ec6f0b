"""Cache measurements in a file.

The file belongs to one machine, driver and version of torch, and is used only if a caller asks for
it. A file that is malformed, or of another machine, is reported and replaced. Knows no task:
measurements have names.
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

from autosched._lib import json_reader
from autosched._lib.files import write
from autosched.errors import ScheduleError, shown
from autosched.measurement.hardware import hardware

__all__ = ["MeasurementCache", "user_folder"]

Pair = tuple[float, float]


class MeasurementCache:
    """Pairs of numbers by name, read from a file and written to it by ``save``.

    ``folder`` contains the file; True is the user's own folder. Without one nothing is stored.
    """

    def __init__(self, folder: bool | str | os.PathLike[str] | None) -> None:
        self.path: Path | None = None
        self.pairs: dict[str, Pair] = {}
        self._changed = False
        if folder is None or folder is False:
            return
        if folder is not True and not isinstance(folder, (str, os.PathLike)):
            raise ScheduleError(
                f"cache must be a folder, True for the user's own, or None, got {shown(folder)}"
            )
        text = json.dumps(hardware(), sort_keys=True)
        name = f"measured-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self.path = (user_folder() if folder is True else Path(folder)) / name
        if self.path.exists():
            try:
                self.pairs = _read(self.path)
            except (OSError, ScheduleError, UnicodeDecodeError) as error:
                warnings.warn(
                    f"{self.path} is not used, everything is measured again: {error}", stacklevel=4
                )

    def get(self, *name: str | None) -> Pair | None:
        """Return the pair of a name, which may have parts.

        The result is None if there is no such pair, or a part has no name.
        """
        return None if None in name else self.pairs.get(" ".join(map(str, name)))

    def put(self, pair: Pair, *name: str | None) -> None:
        """Store a pair under a name, unless it is not a pair of times."""
        are_times = all(0 <= number < math.inf for number in pair)
        if self.path is not None and None not in name and are_times:
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
                self.pairs = _read(self.path) | self.pairs  # another process may have written it
            document = {"machine": hardware(), "readings": self.pairs}
            write(self.path, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            warnings.warn(f"measurements are not cached: {error}", stacklevel=4)


def user_folder() -> Path:
    """Return the folder for this user's caches."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "autosched"


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
_FILE = json_reader.struct(dict, {"machine": _anything, "readings": json_reader.table(_pair)})
