"""The application: routes, middleware, and the connections that its lifespan opens and closes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from importlib.metadata import version as version_of_package
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

# Importing these modules declares their endpoints.
from relatum_consumer.web import (  # noqa: F401
    collectors,
    contexts,
    groups,
    message,
    missing,
    search,
    streams,
    trace,
)
from relatum_consumer.web.endpoint import ENDPOINTS, document_of, given_out, page_of
from relatum_consumer.web.guards import SecurityMiddleware, TokenNeeded
from relatum_consumer.web.links import MCP_PATH, Links
from relatum_consumer.web.options import WebOptions, of_extra
from relatum_consumer.web.problems import Problem
from relatum_consumer.web.rendering import Rendering, static_files, version_of
from relatum_consumer.web.schemas import openapi
from relatum_consumer.web.site import Site


def make_application(options: WebOptions) -> Starlette:
    """Return the page as an ASGI application. Its lifespan opens the connections to both servers, and closes them.

    Args:
        options: The options of the page.

    Raises:
        ConfigurationError: the extra `mcp` is not installed. Starting the application raises it for an invalid URL.
    """
    static = static_files()
    links = Links(options.root_path, version_of(static))
    rendering = Rendering(links)
    if options.mcp:
        with of_extra("mcp"):
            from relatum_consumer.web.mcp_server import over_http

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        application.state.site = site = Site(options, links)
        watching = asyncio.create_task(site.servers.watch())
        try:
            async with over_http(site) if options.mcp else nullcontext() as application.state.mcp:
                yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await site.close()

    async def http_problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "this handles no others"
        code, words = ("not_found", "there is no such page") if error.status_code == 404 else ("http", error.detail)
        hint = "Begin with the search, or the streams."
        return rendering.problem(Problem(error.status_code, code, words, hint, error.headers or {}), request.scope)

    application = Starlette(
        routes=_routes(options, rendering, links, static),
        lifespan=lifespan,
        exception_handlers={HTTPException: http_problem},
        middleware=[
            Middleware(SecurityMiddleware, options.root_path),
            Middleware(TrustedHostMiddleware, options.allowed_hosts, www_redirect=False),
            Middleware(TokenNeeded, options, rendering),
        ],
    )
    application.router.redirect_slashes = False
    return application


class _Tools:
    """Passes a request to the tools. Only POST is accepted: the tools never send a message by themselves."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if scope["method"] != "POST":
            problem = Problem(405, "method_not_allowed", "tools are called by POST", "", {"Allow": "POST"})
        elif origin is not None and urlsplit(origin).netloc != headers.get("host"):
            problem = Problem(403, "other_site", "the request comes from a page of another site")
        else:
            await scope["app"].state.mcp(scope, receive, send)
            return
        await self._rendering.problem(problem, scope)(scope, receive, send)


def _routes(
    options: WebOptions, rendering: Rendering, links: Links, static: dict[str, tuple[bytes, str]]
) -> list[Route]:
    described = openapi(ENDPOINTS, options.root_path, version_of_package("relatum"))

    async def description(_: Request) -> Response:
        return rendering.json(described)

    async def static_file(request: Request) -> Response:
        """Return a static file. Browsers may cache it: its path changes when the file does."""
        file = static.get(request.path_params["file"])
        if file is None:
            return Response("there is no such file\n", 404, media_type="text/plain")
        is_present = request.path_params["version"] == links.version
        kept = "public, max-age=31536000, immutable" if is_present else "no-cache"
        content, kind = file
        return Response(content, headers={"Cache-Control": kept}, media_type=kind)

    routes = [Route("/api/openapi.json", description), Route("/static/{version}/{file}", static_file)]
    if options.mcp:
        routes.append(Route(MCP_PATH, _Tools(rendering)))
    for endpoint in ENDPOINTS:
        routes.append(Route(f"/api{endpoint.path}", document_of(endpoint, rendering)))
        for part, give in endpoint.files.items():
            routes.append(Route(f"{endpoint.path}/{part}", given_out(endpoint, give, rendering)))
        if endpoint.template is not None:
            routes.append(Route(endpoint.page_path, page_of(endpoint, rendering)))
    return routes
