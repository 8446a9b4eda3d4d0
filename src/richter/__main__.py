"""Run the command line: ``python -m richter``."""

from __future__ import annotations

import sys

from richter.cli import main

if __name__ == "__main__":
    sys.exit(main())
