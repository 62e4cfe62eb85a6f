"""The page's ASGI application (routes, lifespan, middleware) and its HTTP server.

The middleware handles the root path of a proxy, security headers, the audit log, and the page's token.
"""

import asyncio
import hashlib
import hmac
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import version as version_of_package
from typing import Final
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relatum.common.closing import Closing
from relatum.errors import ServerStartFailed

# Importing these modules declares their endpoints.
from relatum_consumer.web import collectors, contexts, groups, message, missing, search, streams, trace  # noqa: F401
from relatum_consumer.web.endpoint import ENDPOINTS, document_of, handler_of, openapi, page_of
from relatum_consumer.web.options import WebOptions, of_extra
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.rendering import Rendering, static_files
from relatum_consumer.web.site import MCP_PATH, Links, Site

_audit = logging.getLogger("relatum.web.audit")


def make_application(options: WebOptions) -> Starlette:
    """Return the page as an ASGI application. Its lifespan opens and closes the connections to both servers.

    Args:
        options: The options of the page.

    Raises:
        ConfigurationError: the extra `mcp` is not installed. An invalid URL raises it when the application starts.
    """
    static = static_files()
    # The version changes with each static file.
    links = Links(options.root_path, hashlib.sha256(repr(sorted(static.items())).encode()).hexdigest()[:16])
    rendering = Rendering(links)
    if options.mcp:
        with of_extra("mcp"):
            from relatum_consumer.web.mcp_server import over_http

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        application.state.site = site = Site(options, links)
        watch_task = asyncio.create_task(site.watch())
        try:
            async with over_http(site) if options.mcp else nullcontext() as application.state.mcp:
                yield
        finally:
            watch_task.cancel()
            await asyncio.wait([watch_task])
            await site.close()

    async def http_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class only"
        code, words = ("not_found", "there is no such page") if error.status_code == 404 else ("http", error.detail)
        hint = "Open the search or the list of streams."
        return rendering.problem(Problem(error.status_code, code, words, hint, error.headers or {}), request.scope)

    application = Starlette(
        routes=_routes(options, rendering, links, static),
        lifespan=lifespan,
        exception_handlers={HTTPException: http_problem},
        middleware=[
            Middleware(secured, options.root_path),
            Middleware(TrustedHostMiddleware, options.allowed_hosts, www_redirect=False),
            Middleware(guarded, options, rendering),
        ],
    )
    application.router.redirect_slashes = False
    return application


def _routes(
    options: WebOptions, rendering: Rendering, links: Links, static: dict[str, tuple[bytes, str]]
) -> list[Route]:
    description = rendering.json(openapi(ENDPOINTS, options.root_path, version_of_package("relatum")))

    async def static_file(request: Request) -> Response:
        """Return a static file, which browsers may cache if the version in its path is current."""
        file = static.get(request.path_params["file"])
        if file is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        is_current = request.path_params["version"] == links.version
        cache_control = "public, max-age=31536000, immutable" if is_current else "no-cache"
        content, kind = file
        return Response(content, headers={"Cache-Control": cache_control}, media_type=kind)

    async def tools(request: Request) -> ASGIApp:
        """Pass a request to the tools. The route accepts only POST, because the tools never push messages."""
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            problem = Problem(403, "other_site", "the request comes from a page of another site")
            return rendering.problem(problem, request.scope)
        handler: ASGIApp = request.app.state.mcp
        return handler

    routes = [
        Route("/api/openapi.json", description, methods=["GET"]),
        Route("/static/{version}/{file}", static_file),
        Route("/message/body", handler_of(message.body_file, rendering)),
    ]
    if options.mcp:
        routes.append(Route(MCP_PATH, tools, methods=["POST"]))
    for endpoint in ENDPOINTS:
        routes.append(Route(f"/api{endpoint.path}", document_of(endpoint, rendering)))
        if endpoint.is_page:
            routes.append(Route(endpoint.page_path, page_of(endpoint, rendering)))
    return routes


# --- middleware -------------------------------------------------------------------------------------------

_CSP: Final = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
"""The content security policy: nothing from other hosts, no inline scripts or styles."""

_SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": _CSP,
    "Cache-Control": "no-store",
}
"""Default headers of every response."""

_NAME_CHARACTERS_MAX: Final = 1_000
"""Maximum characters of parameter names in a log line."""


def secured(app: ASGIApp, root_path: str) -> ASGIApp:
    """Strip the root path, add the security headers, and log each request, never with the values of parameters."""

    async def secured_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        # The raw path stays percent-encoded, so no line break reaches the log.
        raw = scope.get("raw_path") or scope["path"].encode()
        path = raw.partition(b"?")[0].decode("latin-1")
        if root_path and (path == root_path or path.startswith(f"{root_path}/")):
            path = path[len(root_path) :] or "/"
        scope = {**scope, "path": path, "root_path": ""}
        started_at, status = time.perf_counter(), 0

        async def send_secured(event: Message) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                headers = MutableHeaders(scope=event)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(event)

        try:
            # For process monitors. It reveals nothing, so it needs no token.
            await (PlainTextResponse("alive\n") if path == "/alive" else app)(scope, receive, send_secured)
        finally:
            if path != "/alive" and not path.startswith("/static/"):
                client = (scope.get("client") or ["-"])[0]
                query = scope["query_string"].decode("latin-1").split("&")
                names = ",".join(dict.fromkeys(each.partition("=")[0] for each in query))[:_NAME_CHARACTERS_MAX] or "-"
                ms = 1e3 * (time.perf_counter() - started_at)
                _audit.info("%s %s %s %s %d %.1f ms", client, scope["method"], path, names, status, ms)

    return secured_app


# --- the token --------------------------------------------------------------------------------------------

_TOKEN_NEEDED: Final = Problem(
    401,
    "token_needed",
    "this page needs its token",
    "Add ?token=… with the page's token to the address; programs send it as Authorization: Bearer.",
    {"WWW-Authenticate": 'Bearer realm="Relatum"'},
)


def guarded(app: ASGIApp, options: WebOptions, rendering: Rendering) -> ASGIApp:
    """Accept requests with the page's token: in a cookie, as a bearer token, or in the URL, which sets the cookie."""
    if options.token is None:
        return app
    # The cookie holds the token's hash, since a token may have characters that cookies cannot.
    page_digest, root = _digest(options.token), options.root_path
    # Browsers send a cookie to all ports of a host: each page's cookie has its own name.
    cookie_name = f"relatum_{page_digest[:8]}"

    def is_right(digest: str) -> bool:
        return hmac.compare_digest(digest.encode(), page_digest.encode())

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        chosen = app
        if scope["type"] == "http" and not scope["path"].startswith("/static/"):
            request = HTTPConnection(scope)
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            cookie, query = request.cookies.get(cookie_name, ""), request.query_params.multi_items()
            if any(name == "token" and is_right(_digest(value)) for name, value in query):
                # The same URL without the token. Exactly one slash: two would redirect to another host.
                rest = urlencode([pair for pair in query if pair[0] != "token"])
                chosen = RedirectResponse(f"{root}/{scope['path'].lstrip('/')}{'?' if rest else ''}{rest}", 303)
                chosen.set_cookie(
                    cookie_name, page_digest, path=f"{root}/", secure=options.is_https, httponly=True, samesite="strict"
                )
            elif not (kind.lower() == "bearer" and is_right(_digest(token))) and not is_right(cookie):
                chosen = rendering.problem(_TOKEN_NEEDED, scope)
        await chosen(scope, receive, send)

    return guarded_app


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- the server: uvicorn in a thread --------------------------------------------------------------------

_CONNECTIONS_MAX: Final = 500
"""Maximum concurrent connections and requests."""

_DRAIN_S: Final = 10
"""How long requests in progress may take after `close`, in seconds."""

_HEADER_BYTES_MAX: Final = 32 << 10
"""Maximum bytes of a request line with headers: room for a search with a long list of streams."""

_CLIENT_TIMEOUT_MS: Final = 30_000
"""Milliseconds for which a client may leave sent data unacknowledged or unread before its connection is closed."""


class WebServer(Closing):
    """Serves the page until it is closed. A context manager.

    Args:
        options: The options of the page.

    Raises:
        ConfigurationError: the extra `mcp` is not installed.
        ServerStartFailed: the port is in use, or the server did not start, for example because a URL is invalid.
    """

    def __init__(self, options: WebOptions) -> None:
        application = make_application(options)
        try:
            family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
            self._socket = socket.create_server((options.host, options.port), family=family, backlog=128)
            # Accepted sockets inherit it. Without it, a second write waits 40 ms for the client's delayed ACK.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                # Accepted sockets inherit it. Without it, a vanished client's connection stays open for 15 minutes.
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CLIENT_TIMEOUT_MS)
        except OSError as error:
            where = f"{options.host}:{options.port}"
            raise ServerStartFailed(f"cannot listen on {where}: {error.strerror or error}; try another port") from error
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}{options.root_path}/"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                http="h11",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS_MAX,
                h11_max_incomplete_event_size=_HEADER_BYTES_MAX,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=_DRAIN_S,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="relatum-web", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.02)
        if not self._server.started:
            self.close()
            raise ServerStartFailed("the page did not start: see the log")

    @property
    def is_running(self) -> bool:
        """Whether the server is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting requests, wait up to ten seconds for requests in progress, and close all connections."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
