"""The audit log: one record for each request, with the names of its parameters and none of their values."""

import logging
import time
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("relatum.web.audit")

_NAMES_MAX: Final = 1_000
"""Characters kept of the names of parameters."""


class Audit:
    """Logs a record for each request, once it is answered.

    It has the client's address, the method, the path, the names of the query's parameters, the status, and
    milliseconds; the values of parameters are never in it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request, and write it down."""
        if scope["type"] != "http" or scope["path"].startswith("/static/"):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            client = (scope.get("client") or ["-"])[0]
            # As they were sent: what is percent-encoded stays so, and breaks no line.
            query = scope["query_string"].decode("latin-1").split("&")
            names = ",".join(dict.fromkeys(each.partition("=")[0] for each in query))[:_NAMES_MAX] or "-"
            ms = 1e3 * (time.perf_counter() - began)
            log.info("%s %s %s %s %d %.1f ms", client, scope["method"], scope["path"], names, status, ms)
