"""Middleware: paths as they were sent, and security headers."""

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class Paths:
    """Paths as they were sent, without what a proxy puts before them: a `/` in a stream's name is none of the path.

    `/alive` is answered here, whoever asks.
    """

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
            if path == _ALIVE:
                await PlainTextResponse("alive\n")(scope, receive, send)
                return
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
