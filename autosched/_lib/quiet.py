"""Silence torch's logs of failed fake tensor operations.

The error that follows contains the same information in one line.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the traceback that torch logs if an operator cannot run on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    drop = _Drop()
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


class _Drop(logging.Filter):
    """Drops log messages about failed operators; one per use, so that uses may overlap."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")
