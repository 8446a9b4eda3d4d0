"""What the site needs beside docs/*.md: the pages that lie in the root of the repository, and docstrings as plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Pages of the root as pages of the site; their links to docs/x.md become links to x.md."""
    root = Path(config.config_file_path).parent
    for name, address in ROOT_PAGES.items():
        files.append(File.generated(config, address, content=(root / name).read_text(encoding="utf-8").replace("](docs/", "](")))
    return files


class Plain(Extension):
    """Docstrings are plain text with code in it; Markdown would see tags, links and emphasis in its formulas."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Examples and tables as blocks of code, everything else as it is written: <A, B>, x * y and W[n][m] stay what they are."""
    return "\n\n".join(_block(block) for block in re.split(r"\n\s*\n", text.rstrip()))


def _block(block: str) -> str:
    if block.startswith("    "):
        return block
    if block.startswith((">>>", "===")):
        return f"```{'python' if block[0] == '>' else 'text'}\n{block}\n```"
    parts = re.split(r"(``.+?``|`[^`]+`)", block, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else re.sub(r"([*\[])", r"\\\1", part).replace("<", "&lt;") for part in parts)
