"""HTML from Python, escaped in one place: every value that is not ``Markup`` is treated as text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

VOID = {"meta", "br", "img", "hr"}


class Markup(str):
    """A text that is already HTML."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escape a value, unless it is markup already."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def joined(parts: Iterable[object], between: object = "") -> Markup:
    """Concatenate markup, and escape other parts."""
    return Markup(text(between).join(text(p) for p in parts))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """``tag("p", "1 < 2", class_="note")`` -> ``<p class="note">1 &lt; 2</p>``. Attributes that are None are left out."""
    pairs = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(str(v))}"' for k, v in attributes.items() if v is not None)
    return Markup(f"<{name}{pairs}>" if name in VOID else f"<{name}{pairs}>{joined(inside)}</{name}>")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], **attributes: object) -> Markup:
    """Return a table that scrolls by itself if it is wide. The first cell of a row is its heading."""
    head = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in heads))) if heads else ""
    body = tag("tbody", *(tag("tr", tag("th", first, scope="row"), *(tag("td", c) for c in rest)) for first, *rest in rows))
    return tag("div", tag("table", head, body, **attributes), class_="wide")
