"""``richter serve``: a live dashboard of a store of runs, in the browser. It is read-only."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from richter.core import RichterError, SelectionError, StoreError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

NEEDS = ("starlette", "uvicorn", "plotly")  # packages that the extra "dashboard" installs


def serve(store: str | os.PathLike[str] = "runs", host: str = "127.0.0.1", port: int = 8642, token: str | None = None,
          open_browser: bool = False) -> None:
    """Show the runs below ``store`` until interrupted. The address is printed when the server is ready; ``port=0`` takes a free
    port. Other machines can connect only with ``host="0.0.0.0"`` (or another address of this machine), and they need the token in
    the printed address.

    """
    _need_the_extra()
    import uvicorn

    from richter.report.connections import Limited
    from richter.report.guard import chosen_token
    if Path(store).exists() and not Path(store).is_dir():
        raise StoreError(f"{store} is a file; a store is a folder of runs.")
    token = chosen_token(host, token)
    with contextlib.closing(_listening(host, port)) as listening:
        number = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
        settings = uvicorn.Config(application(store, host, token), log_level="error", access_log=False, lifespan="off",
                                  http=Limited, ws="none", server_header=False, timeout_graceful_shutdown=1)
        print(f"Richter shows {store} at {address}  (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Timer(0.3, webbrowser.open, [address]).start()
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listening])


def application(store: str | os.PathLike[str], host: str = "127.0.0.1", token: str | None = None) -> ASGIApp:
    """Return the dashboard as an ASGI application, for a server of your own."""
    _need_the_extra()
    from richter.report.app import application
    return application(store, host, token)


def _need_the_extra() -> None:
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise RichterError(f"the dashboard needs {', '.join(missing)}, which a plain installation does not include: "
                           f"pip install 'richter[dashboard]'. Reports (`richter report`) work without it.")


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2 ** 16:
        raise SelectionError(f"port={port} is not a port: use 1 to 65535, or 0 for any free port.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    except (OSError, UnicodeError) as why:
        raise SelectionError(f"cannot listen at {host}, port {port}: {why}. If the port is taken (by another dashboard?), choose "
                             f"another one, or 0 for any free port.") from why
