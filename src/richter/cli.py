"""The command line. The commands are found in ``richter.commands``; nothing heavy is imported before one needs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from richter.commands.frame import parser
from richter.core import RichterError
from richter.core.values import visible

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit code. Every error is one sentence."""
    given = parser().parse_args(arguments)
    try:
        return int(given.do(given))
    except RichterError as why:
        print(visible(f"richter {given.command}: {why}"), file=sys.stderr)
        return 2
    except OSError as why:
        if isinstance(why, BrokenPipeError):  # e.g. `richter list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        where = f": {why.filename}" if why.filename else ""
        print(visible(f"richter {given.command}: {why.strerror or why}{where}."), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
