"""The page without a server, on a loop in a thread: one that was suspended would take servers for silent."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlencode

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from relatum_consumer.web import WebOptions, make_application


class Asking:
    """Asks the page."""

    def __init__(self, portal: BlockingPortal, client: httpx.AsyncClient) -> None:
        self._portal = portal
        self._client = client

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request; a relative path, with its query, is sent as it is."""
        return self._portal.call(partial(self._client.request, method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def answer(self, path: str, **query: Any) -> Any:
        response = self.get(f"/api{path}?{urlencode(query, doseq=True)}")
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def together(self, paths: list[str]) -> list[httpx.Response]:
        async def ask() -> list[httpx.Response]:
            return await asyncio.gather(*(self._client.get(path) for path in paths))

        return self._portal.call(ask)


def at(stream: str, offset: int | None = None, part: str = "") -> str:
    """Where the page of a stream is, of a message, or of its `body`."""
    if offset is None:
        return f"/stream?{urlencode({'stream': stream})}"
    return f"/message{part and '/'}{part}?{urlencode({'stream': stream, 'offset': offset})}"


@contextmanager
def asking(options: WebOptions) -> Iterator[Asking]:
    application = make_application(options)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(application.router.lifespan_context(application)),
        portal.wrap_async_context_manager(
            httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://localhost")
        ) as client,
    ):
        yield Asking(portal, client)
