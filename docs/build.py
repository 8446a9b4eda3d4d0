"""docs/*.md as plain pages under site/, and a check that no link between them is dead."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import markdown

HERE = Path(__file__).parent
STYLE = ("body{max-width:60rem;margin:2rem auto;padding:0 1rem;font:16px/1.55 system-ui,sans-serif;color:#222}"
         "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.3rem .6rem;text-align:left;vertical-align:top}"
         "code{background:#f4f4f4;padding:.1rem .25rem}pre{background:#f4f4f4;padding:.8rem;overflow:auto}pre code{padding:0}"
         "img{max-width:100%}")


def main() -> int:
    site = HERE.parent / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    pages = {p.name: p for p in [HERE.parent / "README.md", *sorted(HERE.glob("*.md"))]}
    dead = []
    for name, page in pages.items():
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            if not (page.parent / target).exists():
                dead.append(f"{name}: {target}")
        body = markdown.markdown(text, extensions=["tables", "fenced_code", "toc"])
        body = re.sub(r'(href|src)="(?:docs/)?([^":/]+?)(?:\.md)?"', lambda m: f'{m[1]}="{_page(m[2])}"', body)
        (site / _page(name.removesuffix(".md"))).write_text(
            f"<!doctype html><meta charset='utf-8'><title>Richter: {name}</title><style>{STYLE}</style>{body}")
    for picture in HERE.glob("*.png"):
        shutil.copy(picture, site)
    for line in dead:
        print(f"dead link in {line}", file=sys.stderr)
    print(f"{len(pages)} pages in {site.name}/")
    return bool(dead)


def _page(stem: str) -> str:
    return "index.html" if stem == "README" else stem if "." in stem or stem.startswith("#") else f"{stem}.html"


if __name__ == "__main__":
    sys.exit(main())
