"""The command line. Commands come from ``richter.commands``; heavy packages are imported only when a command needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from richter.commands.frame import parser
from richter.core import RichterError
from richter.core.values import visible

__all__ = ["main", "parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Every error is printed as one sentence. Without arguments it shows help."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser().print_help()
        return 0
    args = parser().parse_args(given)
    try:
        return int(args.do(args))
    except RichterError as why:
        print(visible(f"richter {args.command}: {why}"), file=sys.stderr)
        return 2
    except OSError as why:
        if isinstance(why, BrokenPipeError):  # e.g. `richter list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        where = f": {why.filename}" if why.filename else ""
        print(visible(f"richter {args.command}: {why.strerror or why}{where}."), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished results are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
