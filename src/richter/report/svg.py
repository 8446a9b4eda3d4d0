"""Figures as text and bytes: SVG that is small, the same every time and safe to stand inside a page, and PDF."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from richter.report.looks import SAVED

HEADER = '<?xml version="1.0" encoding="utf-8"?>\n'
NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def svg_text(figure: Figure, name: str) -> str:
    """A file of its own."""
    return HEADER + inline_svg(figure, name).replace("<svg ", f"<svg {NAMESPACES} ", 1)


def inline_svg(figure: Figure, name: str, label: str = "") -> str:
    """For the inside of an HTML page. ``name`` keeps the identifiers of several figures in one page apart."""
    import html

    import matplotlib
    out = io.StringIO()
    with matplotlib.rc_context({**SAVED, "svg.hashsalt": name}), _laid_out(figure):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<style type="text/css">.*?</style>', "", text, flags=re.DOTALL)  # it would hold for the whole page
    text = re.sub(r"<defs>\s*</defs>", "", text)
    text = re.sub(r"<[^>]+>", _smaller, text)
    text = re.sub(r">\s+<", "><", text)
    opening = re.search(r'<svg [^>]*?width="([\d.]+)pt" height="([\d.]+)pt" viewBox="([^"]+)"', text)
    assert opening is not None
    body = text[text.index(">") + 1:]
    about = f' role="img" aria-label="{html.escape(label)}"' if label else ""
    return (f'<svg width="{float(opening[1]) / 72 * 96:.0f}" height="{float(opening[2]) / 72 * 96:.0f}" viewBox="{opening[3]}"'
            f' stroke-linejoin="round" stroke-linecap="butt"{about}>{body}').strip() + "\n"


def _smaller(tag: re.Match[str]) -> str:
    """A tag with two digits after the point and without the names of groups. Texts are between tags and stay as they are."""
    text = tag[0]
    if text.startswith("<g id="):
        text = re.sub(r'^<g id="[^"]*"', "<g", text)
    if "base64," in text:
        head, _, rest = text.partition("base64,")
        data, quote, tail = re.sub(r' id="image[^"]*"', "", rest).partition('"')
        return f"{head}base64,{_fewer_colours(data)}{quote}{tail}"
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip(".") or "0", text)


def _fewer_colours(data: str) -> str:
    """A picture of numbers has the colours of its colour map: kept as a table of at most 255 of them."""
    from PIL import Image
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    out = io.BytesIO()
    image.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    small = base64.b64encode(out.getvalue()).decode()
    return small if image.getextrema()[-1][0] == 255 and len(small) < len(data) else "".join(data.split())  # type: ignore[index]


def pdf_bytes(figure: Figure) -> bytes:
    import matplotlib
    out = io.BytesIO()
    with matplotlib.rc_context(SAVED), _laid_out(figure):
        figure.savefig(out, format="pdf", metadata={"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None})
    return out.getvalue()


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """With its layout computed once, which spares matplotlib a second drawing of everything."""
    engine = figure.get_layout_engine()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # text stays text: whoever shows it has the letters, or not
        if engine is None:
            yield
            return
        # where axes stand decides their ticks, and so the next layout: put back, the same figure is laid out the same again
        before = [(ax, ax.get_position(original=True), ax.get_position(), ax.get_in_layout()) for ax in figure.axes]
        engine.execute(figure)
        figure.set_layout_engine(None)
        try:
            yield
        finally:
            figure.set_layout_engine(engine)
            for ax, original, active, inside in before:
                ax.set_position(original, "original")
                ax.set_position(active, "active")
                ax.set_in_layout(inside)
