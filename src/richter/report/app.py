"""The dashboard as a web application: its page, its scripts and its answers. It needs the extra ``dashboard``."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from richter.core import RichterError, SelectionError, StoreError
from richter.report.answers import answered, answers
from richter.report.guard import AccessGuard
from richter.report.query import Query
from richter.report.shelf import Chosen, Shelf
from richter.report.views import Picture, Sheet

STATIC = Path(__file__).parent / "static"
PICTURES = {"svg": "image/svg+xml", "png": "image/png"}
ALONE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"  # content security policy of an image


def application(store: str | os.PathLike[str], host: str, token: str | None) -> ASGIApp:
    """Dashboard of the runs in a folder, as a web application."""
    shelf = Shelf(store)

    def api(request: Request) -> Response:  # not async: Starlette runs it in a thread
        path = request.path_params["path"]
        return _runs(shelf, request) if path == "runs" else _answer(shelf, request, path)

    app = Starlette(routes=[Route("/", _page), Route("/plotly.js", _plotly), Mount("/static", StaticFiles(directory=STATIC)),
                            Route("/api/{path}", api)],
                    exception_handlers={RichterError: _sorry, HTTPException: _sorry})
    app.router.redirect_slashes = False
    return AccessGuard(app, host, token)


def _runs(shelf: Shelf, request: Request) -> Response:
    """Return all runs: name, status, last step, times, and a mark that changes when the run has new data."""
    lines = shelf.listing.text()
    head = f'{{"store":{json.dumps(shelf.given)},"now":{time.time()},"runs":'
    return _tagged(request, lines, lambda: Written(f"{head}{lines}}}"))


class Written(NamedTuple):
    """A reply that is already JSON text."""

    text: str


def _answer(shelf: Shelf, request: Request, path: str) -> Response:
    """Answer of a view, or 304 if it has not changed."""
    handlers = answers()
    if path not in handlers:
        raise HTTPException(404, f"no view answers to {path[:100]!r}")
    query = Query(request.query_params.multi_items())
    runs = Chosen(shelf, query.several("run"))
    return _tagged(request, runs.mark, lambda: answered(path, handlers[path], runs, query))


def _tagged(request: Request, state: str, compute: Callable[[], Any]) -> Response:
    """Return status 304 without a body if the browser already has the answer for this state."""
    tag = f'"{hashlib.sha256(repr((state, request.url.query)).encode("utf-8", "replace")).hexdigest()[:24]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    reply = compute()
    if isinstance(reply, Picture):
        return Response(reply.data, media_type=PICTURES[reply.kind], headers={"Content-Security-Policy": ALONE})
    if isinstance(reply, Sheet):
        return _table(*reply)
    if isinstance(reply, Written):
        return Response(reply.text, headers={"ETag": tag}, media_type="application/json")
    return _json(reply, headers={"ETag": tag})


def _json(reply: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    try:
        text = json.dumps(reply, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as why:
        raise StoreError(f"the answer of this view cannot be written as JSON: {why}. Let your view return panels: Curves, Table, "
                         f"Words.") from why
    return Response(text, status, headers, media_type="application/json")


def _table(name: str, header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(map(_cell, row) for row in rows)
    return Response(text.getvalue(), media_type="text/csv",
                    headers={"Content-Disposition": f'attachment; filename="richter-{name}.csv"'})


def _cell(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would read as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _page(_: Request) -> Response:
    """The dashboard's page."""
    return FileResponse(STATIC / "dashboard.html")


def _plotly(request: Request) -> Response:
    """Serve plotly.js from the installed Python package. The package itself is slow to import, so it is not imported."""
    package = importlib.metadata.distribution("plotly")
    tag = f'"plotly-{package.version}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return FileResponse(Path(str(package.locate_file("plotly/package_data/plotly.min.js"))), headers={"ETag": tag})


def _sorry(_: Request, why: Exception) -> Response:
    """Answer that reports an error."""
    if isinstance(why, HTTPException):
        return _json({"error": f"There is nothing here: {why.detail}."}, why.status_code)
    return _json({"error": str(why)}, 400 if isinstance(why, SelectionError) else 404)
