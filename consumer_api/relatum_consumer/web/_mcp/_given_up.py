"""Calls that are given up over HTTP by clients that say so in another request, as the protocol of 2025 has it.

Such a client is told a random id when it first asks, which it sends with all that follows. Nothing is kept by it but
the calls that are under way: who comes with an id of before a restart is answered as anybody.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION: Final = "mcp-session-id"

_GIVEN_UP: Final = "notifications/cancelled"


class GivenUp:
    """Knows the calls under way, and ends those that are given up."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], anyio.CancelScope] = {}

    @contextmanager
    def call(self, session: str | None, number: Any) -> Iterator[anyio.CancelScope]:
        """What is done within ends once the client with this id gives up its request of this number."""
        with anyio.CancelScope() as scope:
            if session is None:
                yield scope
                return
            place = session, str(number)
            self._under_way[place] = scope
            try:
                yield scope
            finally:
                if self._under_way.get(place) is scope:
                    del self._under_way[place]

    def listening(self, app: ASGIApp) -> ASGIApp:
        """The application, which is asked as before: clients of 2025 are told an id, and heard."""

        async def listen(scope: Scope, receive: Receive, send: Send) -> None:
            headers = Headers(scope=scope)
            session, read = headers.get(SESSION), bytearray()

            async def hear() -> Message:
                message = await receive()
                if session is not None and message["type"] == "http.request":
                    read.extend(message.get("body", b""))
                    if not message.get("more_body", False):
                        self._hear(session, bytes(read))
                return message

            async def tell(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[SESSION] = secrets.token_urlsafe(16)
                await send(message)

            # Of this header the first request of 2025 has none, and each of later ones has.
            is_first = session is None and "mcp-protocol-version" not in headers
            await app(scope, hear, tell if is_first else send)

        return listen

    def _hear(self, session: str, request: bytes) -> None:
        if _GIVEN_UP.encode() not in request:
            return
        try:
            said = json.loads(request)
            number = said["params"]["requestId"] if said["method"] == _GIVEN_UP else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        under_way = self._under_way.get((session, str(number)))
        if under_way is not None:
            under_way.cancel()
