"""Define the logger ``autosched``.

It logs captures, recaptures and plans, with their seconds; with level DEBUG, also the tracebacks of
tasks that failed while they were recorded. To show them:

    logging.basicConfig(level=logging.INFO)
"""

from __future__ import annotations

import logging

LOG = logging.getLogger("autosched")
LOG.addHandler(logging.NullHandler())
