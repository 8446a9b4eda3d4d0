"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from richter import __version__
from richter.commands import command, data, experiments, runs

CONTENTS = """\
start
  demo        train a small network on digits, watch it, say which layers learned, write a report

look at runs
  runs        what is in a store: status, last step, model
  report      one HTML file with the verdict, curves, matrices and settings of one or more runs
  serve       a live dashboard of a store
  doctor      lazy or rich, which layers learn, what to turn
  export      rows and scalars as CSV or Parquet

reproduce papers
  list        experiments with their cost, and measures with their references
  run         one experiment, at the small or at the paper's scale
  check       run experiments and compare every claim with its bar
  ledger      write docs/claims.md from the stored records
  cite        BibTeX of an experiment, a measure or a paper

data
  data        fetch, list and find the data sets

  completion  for bash, zsh and tcsh

`richter COMMAND --help` shows the options and examples of each."""


def parser(listed: bool = False) -> argparse.ArgumentParser:
    """``listed``: the commands are also listed by argparse itself, where completion looks for them."""
    top = argparse.ArgumentParser(prog="richter", usage="richter COMMAND ...", epilog=CONTENTS,
                                  description="Richter measures how rich training is.",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"richter {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND",
                                  help=None if listed else argparse.SUPPRESS)
    for part in (runs, experiments, data):
        part.add(commands)
    shell = command(commands, "completion", "print a completion script", _completion,
                    ["source <(richter completion bash)", "richter completion zsh > ~/.zfunc/_richter"])
    shell.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    from richter.core import RichterError
    try:
        return int(given.do(given))
    except RichterError as why:
        print(f"richter {given.command}: {why}", file=sys.stderr)
        return 2
    except OSError as why:
        if isinstance(why, BrokenPipeError):  # e.g. `richter list | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        print(f"richter {given.command}: {why.strerror or why}{f': {why.filename}' if why.filename else ''}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130


def _completion(given: argparse.Namespace) -> int:
    import shtab
    print(shtab.complete(parser(listed=True), shell=given.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
