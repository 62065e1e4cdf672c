"""``python -m vitrine.evidence.recipes NAME``."""

import sys

from .commands import main

sys.exit(main())
