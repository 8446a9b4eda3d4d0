"""The commands, one file each. A file defines ``COMMAND`` and imports heavy packages only when the command runs.

    richter.commands.add(Command("mine", "Say hello.", do=hello))        # add your own, before richter.cli.main()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import Catalogue, lazy_names

if TYPE_CHECKING:
    from richter.commands.frame import Command

CATALOGUE: Catalogue[Command] = Catalogue(__name__, "COMMAND", "command")
names, get, add = CATALOGUE.names, CATALOGUE.get, CATALOGUE.add

__getattr__, __dir__, __all__ = lazy_names(__name__, {"Command": "frame"})
