"""What stands before the pages: paths as they were sent, headers of safety, the host's name, and other sites' forms."""

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relatum_consumer.web._options import WebOptions
from relatum_consumer.web._problems import Problem
from relatum_consumer.web._rendering import Rendering

_POLICY: Final = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
"""Nothing of elsewhere, no script and no style within a page."""

_SAFE: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
}
"""Of each answer that does not say otherwise."""

_ALIVE: Final = "/alive"
"""Asked by who watches the process: it tells nothing, and stands before all guards."""

Next = Callable[[Scope, Receive, Send], Awaitable[None]]


class Paths:
    """Paths as they were sent, without what a proxy puts before them: a `/` in a stream's name is none of the path."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request by the path that was sent."""
        if scope["type"] == "http":
            raw = scope.get("raw_path") or scope["path"].encode()
            path = raw.partition(b"?")[0].decode("latin-1")
            if self._root and (path == self._root or path.startswith(f"{self._root}/")):
                path = path[len(self._root) :] or "/"
            scope = {**scope, "path": path, "root_path": ""}
        await self._app(scope, receive, send)


class SafeHeaders:
    """Puts the headers of safety on all answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request; what the answer says itself stays."""

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SAFE.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, put if scope["type"] == "http" else send)


class Hosts:
    """Refuses a request by a name that is not the page's: a name of elsewhere that was turned to this machine.

    And what another site's page has a browser send: only what changes nothing may be asked from there.
    """

    def __init__(self, app: ASGIApp, options: WebOptions, rendering: Rendering) -> None:
        self._app = app
        self._names = options.allowed_hosts
        self._rendering = rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request that came by a name of the page."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == _ALIVE:
            await self._rendering.text("alive\n")(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._problem(scope, headers)
        app: Any = self._app if problem is None else self._rendering.problem(problem, scope)
        await app(scope, receive, send)

    def _problem(self, scope: Scope, headers: Headers) -> Problem | None:
        if "transfer-encoding" in headers:
            # The one form of the page has a length; a proxy that goes by another one would hide a request in it.
            return Problem(411, "length_required", "this was sent without its length", "", {"Connection": "close"})
        host = headers.get("host", "")
        if self._names and _name_of(host) not in self._names:
            hint = "Call it by a name that it was told (--host-name), or as localhost."
            return Problem(421, "unknown_host", f"this page is not called {host[:200]!r}", hint)
        if scope["method"] in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if headers.get("sec-fetch-site", "same-origin") != "same-origin" or (
            origin is not None and urlsplit(origin).netloc != host
        ):
            return Problem(403, "other_site", "this was sent by a page of another site", "Use this page's own form.")
        return None


def _name_of(host: str) -> str:
    """A host's name without its port; of an IPv6 address with its brackets. What has no such form stays as it is."""
    name, separator, port = host.rpartition(":")
    is_with_port = bool(separator) and port.isascii() and port.isdigit()
    return (name if is_with_port else host).lower().rstrip(".")
