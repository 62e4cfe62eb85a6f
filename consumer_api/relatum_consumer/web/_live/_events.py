"""The live view as server-sent events: the answer that goes on."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from relatum_consumer.web._api._live import EVENTS, filter_of
from relatum_consumer.web._endpoint import Handler, problem_met
from relatum_consumer.web._limits import client_of
from relatum_consumer.web._live._clients import Client, event
from relatum_consumer.web._live._hub import Live
from relatum_consumer.web._parameters import parsed
from relatum_consumer.web._rendering import Rendering

BEAT_S: Final = 10.0
"""Seconds after which something is sent where there is nothing to tell: who is gone is noticed by it."""

LIFE_S: Final = 3600.0
"""Seconds after which one asks again: whether one may look is decided anew then."""

RETRY_MS: Final = 2_000
"""Milliseconds after which an `EventSource` comes back."""

_HEADERS: Final = {"X-Accel-Buffering": "no"}
"""nginx gathers what it passes on, else."""


class _Events(StreamingResponse):
    """The events of one client, who is let go whatever ends them."""

    def __init__(self, live: Live, client: Client, until: Callable[[], float]) -> None:
        super().__init__(_told(client, until), headers=_HEADERS, media_type="text/event-stream")
        self._live = live
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            scope.setdefault("state", {})["messages"] = self._client.shown
            self._live.leave(self._client)


async def _told(client: Client, until: Callable[[], float]) -> AsyncIterator[bytes]:
    """What a client is told, until it is to end: which can be sooner than it was, by a logout."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    while not client.end:
        left_s = until() - time.time()
        if left_s <= 0:
            client.stop("renew")
            break
        told = await client.take(min(BEAT_S, left_s))
        if until() > time.time():
            yield told
    yield event("end", f'{{"why":"{client.end}"}}')


def events_of(rendering: Rendering) -> Handler:
    """What answers with events."""

    async def handle(request: Request) -> Response:
        live: Live = request.app.state.live
        try:
            asked: Any = parsed(EVENTS.asked, {}, request.query_params.multi_items())
            by = await filter_of(live.site, asked)
            if request.method == "HEAD":
                return Response(headers=_HEADERS, media_type="text/event-stream")
            who = f"{client_of(request.scope)} {request.scope['state'].get('who', '-')}"
            client = live.enter(by, who, request.headers.get("last-event-id") or asked.after)
        except Exception as error:  # noqa: BLE001
            return rendering.problem(problem_met(error), request.scope)
        until = time.time() + LIFE_S
        session_until = request.scope["state"].get("session_until", lambda: until)
        return _Events(live, client, lambda: min(until, session_until()))

    return handle
