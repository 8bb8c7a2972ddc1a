"""``python -m cgkit`` is ``cgkit``."""

import sys

from cgkit.cli import main

sys.exit(main())
