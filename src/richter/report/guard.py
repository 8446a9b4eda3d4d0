"""Access control of the dashboard: host names, tokens, and the security headers of its answers."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from richter.core import SelectionError

COOKIE = "richter-token"
SHORTEST = 16  # characters of a token
HEADERS = {
    # plotly writes style attributes; only our own scripts run, and they cannot evaluate text as code
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
                               "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
                               "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own."""
    return host == "localhost" or (_address(host) is not None and ipaddress.ip_address(host).is_loopback)


def chosen_token(host: str, token: str | None) -> str | None:
    """Return the token of a server. On a loopback host it is the given one or None; on any other host there is always one."""
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9._~-]{{{SHORTEST},}}", token):
        raise SelectionError(f"this token of {len(token)} characters is too easy to guess, or cannot be part of an address. Give "
                             f"at least {SHORTEST} letters, digits and ._~-, or no token: one is then generated if needed.")
    return token if token is not None or is_loopback(host) else secrets.token_urlsafe(32)


class AccessGuard:
    """An application behind checks of the host, the method and the token."""

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.app, self.token = app, token
        self.hosts = {"localhost", "127.0.0.1", "::1", host.lower()}
        self.everywhere = host in ("0.0.0.0", "::")
        if self.everywhere:
            self.hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send) if scope["type"] == "lifespan" else None
        given = _given(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (*HEADERS.items(), ("Cache-Control", "no-cache")):
                    headers.setdefault(name, value)  # a stored picture has a stricter policy of its own
                if self.token is not None and given.get("token") and self._same(given["token"]):
                    headers["Set-Cookie"] = f"{COOKIE}-{_port(scope)}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            await send(message)

        refusal = self._refusal(scope, given)
        await (refusal or self.app)(scope, receive, answer)

    def _refusal(self, scope: Scope, given: dict[str, str]) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = _host(headers.get("host", ""))
        if host not in self.hosts and not (self.everywhere and _address(host) is not None):
            return PlainTextResponse("This dashboard does not answer to this host name, which another web page may have made up. "
                                     "Use the address that richter serve printed.", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Another web page sent this request. It could not read the answer, but it could measure its "
                                     "time. Open the address that richter serve printed.", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This dashboard only reads: GET and HEAD.", 405, {"Allow": "GET, HEAD"})
        if self.token is not None and not any(self._same(g) for g in given.values()):
            return PlainTextResponse("This dashboard needs its token. Open the whole address that richter serve printed.", 401)
        return None

    def _same(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), (self.token or "").encode())


def _given(scope: Scope) -> dict[str, str]:
    """Return the tokens in the address and in the cookie of this port."""
    try:
        cookie = SimpleCookie(Headers(scope=scope).get("cookie", "")).get(f"{COOKIE}-{_port(scope)}")
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=1000).get("token", [])
    except (CookieError, ValueError):
        return {}
    return ({"token": query[0]} if query else {}) | ({"cookie": cookie.value} if cookie is not None else {})


def _host(header: str) -> str:
    """Return the host name without the port: ``[::1]:80`` gives ``::1``. Anything but a name and a port gives an empty text."""
    parts = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d+)?", header.lower())
    return (parts[1] or parts[2]) if parts else ""


def _port(scope: Scope) -> int:
    return (scope.get("server") or ("", 0))[1] or 0


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
