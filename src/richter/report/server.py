"""``richter serve``: a dashboard of a store of runs, in the browser, live while they train. It only reads."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from richter.core import RichterError, SelectionError, StoreError
from richter.report import answers
from richter.report.guard import Guard, chosen_token
from richter.report.shelf import Shelf

STATIC = Path(__file__).parent / "static"


def serve(store: str | os.PathLike[str] = "runs", host: str = "127.0.0.1", port: int = 8642, token: str | None = None,
          open_browser: bool = False) -> None:
    """Show the runs below ``store`` until interrupted. Prints its address when it listens; ``port=0`` takes a free one.

    Other machines reach it only with ``host="0.0.0.0"`` (or an address of this one), and then need the token in the printed
    address.
    """
    if Path(store).exists() and not Path(store).is_dir():
        raise StoreError(f"{store} is a file; a store is a folder of runs.")
    token = chosen_token(host, token)
    with contextlib.closing(_listening(host, port)) as listening:
        number = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
        settings = uvicorn.Config(application(store, host, token), log_level="warning", access_log=False, lifespan="off",
                                  ws="none", server_header=False, timeout_graceful_shutdown=1)
        print(f"Richter shows {store} at {address}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Timer(0.3, webbrowser.open, [address]).start()
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listening])


def application(store: str | os.PathLike[str], host: str = "127.0.0.1", token: str | None = None) -> ASGIApp:
    """The dashboard as an ASGI application, for a server of your own."""
    shelf = Shelf(store)

    app = Starlette(
        routes=[Route("/", _page), Route("/plotly.js", _plotly), Mount("/static", StaticFiles(directory=STATIC)),
                *(Route(f"/api/{path}", _asking(shelf, answer)) for path, answer in answers.ANSWERS.items())],
        exception_handlers={RichterError: _sorry, HTTPException: _sorry})
    app.router.redirect_slashes = False
    return Guard(app, host, token)


def _asking(shelf: Shelf, answer: Callable[[Shelf, Request], Response]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:  # not async: Starlette gives it a thread
        return answer(shelf, request)
    return endpoint


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "dashboard.html")


def _plotly(request: Request) -> Response:
    """plotly.js as the Python package brings it along; the package itself, which is slow to import, is not imported."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise StoreError("the curves are drawn by plotly.js, which comes with a Python package: pip install plotly.")
    tag = f'"plotly-{importlib.metadata.version("plotly")}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return FileResponse(Path(found.origin).parent / "package_data" / "plotly.min.js", headers={"ETag": tag})


def _sorry(_: Request, why: Exception) -> Response:
    if isinstance(why, HTTPException):
        return answers.as_json({"error": f"There is nothing here: {why.detail}."}, why.status_code)
    return answers.as_json({"error": str(why)}, 400 if isinstance(why, SelectionError) else 404)


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2 ** 16:
        raise SelectionError(f"port={port} is no port: 1 to 65535, or 0 for any that is free.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    except (OSError, UnicodeError) as why:
        raise SelectionError(f"cannot listen at {host}, port {port}: {why}. If the port is taken (by another dashboard?), choose "
                             f"another one, or 0 for any that is free.") from why
