"""Who looked at what: a line of JSON for each request. Never a body, nor a password."""

import json
import logging
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relatum_consumer.web._limits import client_of
from relatum_consumer.web._masking import NAMES, NOT_SAID, VALUES
from relatum_consumer.web._site import Site

log = logging.getLogger("relatum.web.audit")

QUERY_MAX: Final = 8_192
"""Characters kept of a query."""

_NOT_AUDITED: Final = ("/static/", "/alive")


class AuditLog:
    """Writes lines of JSON to a file, opened anew for each, or to the log."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()

    def write(self, line: dict[str, Any]) -> None:
        """Write one."""
        text = json.dumps(line)
        if self._path is None:
            log.info(text)
            return
        try:
            with self._lock, self._path.open("a") as file:
                file.write(f"{text}\n")
        except OSError as error:
            # Opened anew each time, so that a file that was turned away is begun again.
            log.error("cannot be written to %s (%s): %s", self._path, error.strerror, text)  # noqa: TRY400


class Audit:
    """Writes a line for each request, once it is answered.

    A line has `at`, `who` (the name a proxy gave, "password" after a login, else "-"), `client`, `method`, `path`,
    `query` (with digests for values of masked keys; of a tool, its name and arguments), `status`, `messages` (how many
    were shown) and `ms`.
    """

    def __init__(self, app: ASGIApp, path: str | None) -> None:
        self._app = app
        self._log = AuditLog(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request, and write it down."""
        if scope["type"] != "http" or scope["path"].startswith(_NOT_AUDITED):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        seen: dict[str, Any] = scope.setdefault("state", {})

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            ms = round(1e3 * (time.perf_counter() - began), 1)
            self._log.write({**self._line(scope, status), "messages": seen.get("messages", 0), "ms": ms})

    def _line(self, scope: Scope, status: int) -> dict[str, Any]:
        seen = scope["state"]
        query = seen.get("asked") or told(
            scope["query_string"].decode("latin-1"), getattr(scope["app"].state, "site", None)
        )
        return {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": seen.get("who", "-"),
            "client": client_of(scope),
            "method": scope["method"],
            "path": scope["path"],
            "query": query[:QUERY_MAX],
            "status": status,
        }


def told(query: str, site: Site | None) -> str:
    """A query as it is written down: with digests for values of masked keys."""
    given = parse_qsl(query, keep_blank_values=True)
    if (VALUES | NAMES).isdisjoint(name for name, _ in given):
        return query

    def named(value: str) -> str:
        return NOT_SAID if site is None else site.masking.told_name(value)

    given = [(name, named(value) if name in NAMES else value) for name, value in given]
    key = next((value for name, value in given if name == "key"), "")
    shown = [pair for pair in given if pair[0] not in VALUES]
    for name in sorted(VALUES):
        values = [value for each, value in given if each == name]
        if values:
            shown += [(name, value) for value in (site.masking.told(key, values) if site else [NOT_SAID])]
    return urlencode(shown, safe=NOT_SAID)
