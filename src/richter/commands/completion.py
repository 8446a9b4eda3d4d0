"""Print a completion script for bash, zsh or tcsh."""

from __future__ import annotations

import argparse

from richter.commands.frame import Command, parser


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def do(args: argparse.Namespace) -> int:
    import shtab
    print(shtab.complete(parser(listed=True), shell=args.shell))
    return 0


COMMAND = Command("completion", __doc__, do, arguments, examples=(
    "source <(richter completion bash)", "richter completion zsh > ~/.zfunc/_richter"))
