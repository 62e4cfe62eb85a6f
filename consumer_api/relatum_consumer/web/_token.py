"""Access to the page: open on this machine, and elsewhere by one token."""

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._problems import Problem
from relatum_consumer.web._rendering import Rendering

COOKIE: Final = "relatum_token"

_NEEDED: Final = Problem(
    401,
    "token_needed",
    "this page wants its token",
    "Add ?token=… with the page's token to the address; programs send it as Authorization: Bearer.",
    {"WWW-Authenticate": 'Bearer realm="Relatum"'},
)


class TokenNeeded:
    """Lets through who has the token: in a cookie, as `Authorization: Bearer`, or in the address, which sets it.

    Where there is no token everybody is let through.
    """

    def __init__(self, app: ASGIApp, options: WebOptions, rendering: Rendering) -> None:
        self._app = app
        self._options = options
        self._rendering = rendering
        # The cookie holds the token's sum: a token may have characters that no cookie has.
        self._sum = _sum(options.token or "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that has the token; refuse the others."""
        app: ASGIApp = self._app
        if scope["type"] == "http" and self._options.token is not None and not scope["path"].startswith("/static/"):
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if any(name == "token" and self._is_right(_sum(value)) for name, value in query):
                app = self._let_in(scope, [pair for pair in query if pair[0] != "token"])
            elif not self._has_token(Headers(scope=scope)):
                app = self._rendering.problem(_NEEDED, scope)
        await app(scope, receive, send)

    def _has_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return (kind.lower() == "bearer" and self._is_right(_sum(token))) or self._is_right(_cookie(headers))

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._sum.encode())

    def _let_in(self, scope: Scope, query: list[tuple[str, str]]) -> RedirectResponse:
        """Send a browser to the same address without the token, which is then in a cookie."""
        root = self._options.root_path
        # One slash, however many were sent: two would lead to another host.
        path = f"{root}/{scope['path'].lstrip('/')}"
        response = RedirectResponse(f"{path}{'?' if query else ''}{urlencode(query)}", 303)
        response.set_cookie(
            COOKIE, self._sum, path=f"{root}/", secure=self._options.is_https, httponly=True, samesite="strict"
        )
        return response


def _cookie(headers: Headers) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _sum(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
