"""Middleware: the root path of a proxy, security headers, the audit log, and the page's token."""

import hashlib
import hmac
import logging
import time
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relatum_consumer.web.options import WebOptions
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.rendering import Rendering

log = logging.getLogger("relatum.web.audit")

_POLICY: Final = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
"""Nothing from other hosts; no inline scripts or styles."""

_SAFE: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
}
"""Headers of all answers that do not set their own."""

_ALIVE: Final = PlainTextResponse("alive\n")
"""The answer to `/alive`, for process monitors: it reveals nothing and passes no guard."""

_NAMES_MAX: Final = 1_000
"""The most characters of parameters' names in a log line."""


class SecurityMiddleware:
    """Strips the root path, adds the security headers to all answers, and logs each request after its answer.

    A log line has the client's address, the method, the path, the names of the query's parameters, the status, and
    milliseconds. It never has the values of parameters.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The raw path stays percent-encoded, so no line break reaches the log.
        raw = scope.get("raw_path") or scope["path"].encode()
        path = raw.partition(b"?")[0].decode("latin-1")
        if self._root and (path == self._root or path.startswith(f"{self._root}/")):
            path = path[len(self._root) :] or "/"
        scope = {**scope, "path": path, "root_path": ""}
        began, status = time.perf_counter(), 0

        async def put(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await (_ALIVE if path == "/alive" else self._app)(scope, receive, put)
        finally:
            if path != "/alive" and not path.startswith("/static/"):
                client = (scope.get("client") or ["-"])[0]
                query = scope["query_string"].decode("latin-1").split("&")
                names = ",".join(dict.fromkeys(each.partition("=")[0] for each in query))[:_NAMES_MAX] or "-"
                ms = 1e3 * (time.perf_counter() - began)
                log.info("%s %s %s %s %d %.1f ms", client, scope["method"], path, names, status, ms)


# --- the token --------------------------------------------------------------------------------------------

_COOKIE: Final = "relatum_token"

_NEEDED: Final = Problem(
    401,
    "token_needed",
    "this page needs its token",
    "Add ?token=… with the page's token to the address; programs send it as Authorization: Bearer.",
    {"WWW-Authenticate": 'Bearer realm="Relatum"'},
)


class TokenNeeded:
    """Accepts requests with the token: in a cookie, as `Authorization: Bearer`, or in the URL, which sets the cookie.

    If the page has no token, all requests are accepted.
    """

    def __init__(self, app: ASGIApp, options: WebOptions, rendering: Rendering) -> None:
        self._app = app
        self._options = options
        self._rendering = rendering
        # The cookie holds the token's hash: a token may have characters that cookies must not have.
        self._sum = _sum(options.token or "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request with the token; refuse others."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and self._options.token is not None and not scope["path"].startswith("/static/"):
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if any(name == "token" and self._is_right(_sum(value)) for name, value in query):
                app = self._set_cookie(scope, [pair for pair in query if pair[0] != "token"])
            elif not self._has_token(Headers(scope=scope)):
                app = self._rendering.problem(_NEEDED, scope)
        await app(scope, receive, send)

    def _has_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_right(_sum(token)):
            return True
        return self._is_right(cookie_parser(headers.get("cookie", "")).get(_COOKIE, ""))

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._sum.encode())

    def _set_cookie(self, scope: Scope, query: list[tuple[str, str]]) -> RedirectResponse:
        """Redirect to the same URL without the token, which moves to a cookie."""
        root = self._options.root_path
        # Exactly one slash: two would lead to another host.
        path = f"{root}/{scope['path'].lstrip('/')}"
        response = RedirectResponse(f"{path}{'?' if query else ''}{urlencode(query)}", 303)
        response.set_cookie(
            _COOKIE, self._sum, path=f"{root}/", secure=self._options.is_https, httponly=True, samesite="strict"
        )
        return response


def _sum(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
