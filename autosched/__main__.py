"""``python -m autosched`` is ``autosched``."""

import sys

from autosched.cli import main

sys.exit(main())
