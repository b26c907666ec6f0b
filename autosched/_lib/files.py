"""Write files atomically."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically: to a temporary file that then replaces the target."""
    target = Path(path).resolve()  # follows symbolic links
    temporary = target.with_name(f".autosched-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:  # name the requested file in the error
        if str(error.filename) != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
