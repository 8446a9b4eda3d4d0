"""Export of figures: small, reproducible SVG as files or embedded images, and PDF."""

from __future__ import annotations

import base64
import io
import re
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from richter.core import StoreError
from richter.report.looks import SAVED
from richter.report.markup import Markup, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from richter.runs import Run

STATIC = Path(__file__).parent / "static"
STORED = 2 ** 20  # bytes of a stored image that a page embeds

PAGE_FONT = 'text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif !important}'
# Greys and dark colours of a figure, and what they become on a dark page; images in the figure keep their colours.
DARK = {"#ffffff": "#16191d", "#222222": "#dfe4ea", "#333333": "#c9ced6", "#444444": "#b4bbc5", "#555555": "#8b939f",
        "#707070": "#98a1ad", "#8a8a8a": "#7d8590", "#d8d8d8": "#2d333b", "#0072b2": "#4fa8e0", "#009e73": "#1fc29a",
        "#d55e00": "#f07b3a", "#cc79a7": "#de92bd", "#000000": "#e8e8e8"}
_RECOLOURED = "".join(f"[style*='{kind}: {light}']{{{kind}:{dark} !important}}" for light, dark in DARK.items()
                      for kind in ("fill", "stroke"))
DARK_STYLE = f"@media (prefers-color-scheme:dark){{text:not([style*='fill']){{fill:#dfe4ea}}{_RECOLOURED}}}"


def svg_text(figure: Figure) -> str:
    """Return a figure as SVG whose text stays text."""
    import matplotlib
    out = io.StringIO()
    with matplotlib.rc_context(SAVED), _laid_out(figure):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return re.sub(r">\s+<", "><", re.sub(r"<[^>]+>", _smaller, out.getvalue())) + "\n"


def picture(figure: Figure, words: str) -> Markup:
    """Return a figure as an embedded image, in the font of the page. A browser runs no script in an image and loads nothing for
    it, whatever text it contains. ``words``: the alternative text."""
    text = svg_text(figure).replace("</style>", f"{PAGE_FONT}{DARK_STYLE}</style>", 1)
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return image("svg", text.encode(), words, width=width, height=height)


def image(kind: str, data: bytes, words: str, **attributes: object) -> Markup:
    """Return the bytes of an SVG or PNG file as an image with a data address."""
    address = f"data:image/{'svg+xml' if kind == 'svg' else kind};base64,{base64.b64encode(data).decode()}"
    return tag("img", src=address, alt=words, **attributes)


def stored_picture(run: Run, name: str, kind: str, words: str = "") -> Markup:
    """Return an image stored with a run, embedded so that no script can run. A large one is only mentioned."""
    data = run.figure(name, kind)
    if kind == "pdf" or len(data) > STORED:
        return tag("p", f"{name}.{kind} ({len(data) / 1000:.0f} kB) is stored in the run.", class_="soft")
    return tag("figure", tag("div", image(kind, data, words or name), class_="picture"), tag("figcaption", words or name))


def _smaller(element: re.Match[str]) -> str:
    """Round the numbers in an SVG tag to two decimals, which is finer than print. Text is between tags and does not change."""
    head, marker, rest = element[0].partition("base64,")
    head = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip(".") or "0", head)
    if not marker:
        return head
    data, quote, tail = rest.partition('"')
    return f"{head}base64,{_fewer_colours(data)}{quote}{tail}"


def _fewer_colours(data: str) -> str:
    """Store an image of at most 255 colours with a colour table, if that is smaller."""
    from PIL import Image
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    out = io.BytesIO()
    image.convert("RGB").quantize(255, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    small = base64.b64encode(out.getvalue()).decode()
    return small if image.getextrema()[-1][0] == 255 and len(small) < len(data) else "".join(data.split())  # type: ignore[index]


def pdf_bytes(figure: Figure) -> bytes:
    """Figure as the bytes of a PDF file."""
    import matplotlib
    out = io.BytesIO()
    with matplotlib.rc_context(SAVED), _laid_out(figure):
        figure.savefig(out, format="pdf", metadata={"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None})
    return out.getvalue()


def put(path: Path, data: bytes) -> Path:
    """Write a file aside and rename it, so that it is complete or absent. A link is replaced, not followed, because the folder of
    a run may come from a stranger."""
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a regular file, so nothing is written to it. Choose another name.")
    aside = path.with_name(f".richter-{secrets.token_hex(8)}.part")
    try:
        with open(aside, "xb") as file:  # with the permissions of the umask
            file.write(data)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Compute the layout once, so that matplotlib does not draw everything twice."""
    engine = figure.get_layout_engine()
    with warnings.catch_warnings():
        # text stays text: the reader's fonts decide whether a letter is shown
        warnings.filterwarnings("ignore", "Glyph .* missing")
        if engine is None:
            yield
            return
        # Positions of axes determine their ticks, and so the next layout. Restore them, so that the same figure gives the same
        # layout.
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
