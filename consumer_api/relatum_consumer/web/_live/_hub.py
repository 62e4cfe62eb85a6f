"""One round for all who look: what was recorded is compared, written and handed on, once for each filter."""

import asyncio
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.to_thread

from relatum.errors import RelatumError
from relatum_consumer.web._live._clients import Client, Frame, event
from relatum_consumer.web._live._filter import Filter
from relatum_consumer.web._live._intake import Came, Intake
from relatum_consumer.web._live._seen import Definitions, Seen, Writing, read_id
from relatum_consumer.web._problems import Problem, Refused
from relatum_consumer.web._rendering import Rendering
from relatum_consumer.web._site import Site

log = logging.getLogger(__name__)

ROUND_S: Final = 0.2
"""Seconds between two rounds: as many events a second has a client at most."""

LINGER_S: Final = 15.0
"""Seconds that it goes on without a client: who comes back by then is told what was missed."""

KEPT_MAX: Final = 1_000
"""Messages kept for who comes back."""

AWAY_S: Final = 1.0
"""Seconds between two rounds while broker or database are away."""


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round brought: what came, the messages, the number of the last, and each filter's event."""

    came: Came
    seen: list[Seen]
    last: int
    made: Mapping[Filter, Frame | None]


class Live:
    """The live view. Its methods are for the event loop's thread.

    Args:
        site: The servers.
        rendering: Makes rows.
        stopping: Set when the server is told to stop.
    """

    def __init__(self, site: Site, rendering: Rendering, stopping: threading.Event) -> None:
        self.site = site
        self._rendering = rendering
        self._stopping = stopping
        self._clients: dict[Client, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._limiter = anyio.CapacityLimiter(1)
        self._left_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._writing = Writing(self.site, self._rendering, secrets.token_hex(6))
        self._number = 0
        self._kept: deque[Seen] = deque(maxlen=KEPT_MAX)
        self._definitions: Definitions = {}
        self._is_away = False
        self._names: frozenset[str] = frozenset()

    # --- who looks ------------------------------------------------------------------------------------------

    def enter(self, by: Filter, who: str, last_id: str) -> Client:
        """Let somebody look, from now on or from the last event that was seen.

        Raises:
            Refused: too many look.
        """
        options = self.site.options
        if sum(each.who == who for each in self._clients) >= options.live_per_client:
            hint = "Close another tab or window with a live view."
            most = f"{options.live_per_client} live views of yours are open"
            raise Refused(Problem(429, "too_many_live", most, hint, {"Retry-After": "10"}))
        if len(self._clients) >= options.live_max or self._stopping.is_set():
            hint = "Try again in a while; search and streams are there as ever."
            raise Refused(Problem(503, "too_many_live", "too many look at what is live", hint, {"Retry-After": "10"}))
        if self._task is None:
            self._begin()
            self._task = asyncio.create_task(self._run())
        client = Client(by, who)
        self._clients[client] = None
        if last_id:
            self._tell_missed(client, last_id)
        return client

    def leave(self, client: Client) -> None:
        """Let it go."""
        self._clients.pop(client, None)
        self._left_at = time.monotonic()

    async def close(self) -> None:
        """End all."""
        self._stop_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _stop_all(self) -> None:
        for client in self._clients:
            client.stop("stopping")

    def _tell_missed(self, client: Client, last_id: str) -> None:
        """What came since an event: the messages, where they are still known, else since when."""
        run_id, number, at_ms = read_id(last_id)
        if run_id != self._writing.run_id:
            since = datetime.fromtimestamp(at_ms / 1e3, UTC).isoformat(timespec="milliseconds")
            client.put(Frame(event("missed", json.dumps({"since": since})), 0, 0))
            return
        missed = [seen for seen in self._kept if seen.number > number]
        passed = max(0, self._number - number - len(missed))
        frame = self._writing.frame(client.by, missed, passed, self._number, self._definitions)
        if frame is not None:
            client.put(frame)

    # --- rounds ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        intake = Intake(self.site.address, self.site.database)
        try:
            while self._clients or time.monotonic() - self._left_at < LINGER_S:
                began = time.monotonic()
                await self._round(intake)
                pause_s = AWAY_S if self._is_away else ROUND_S - (time.monotonic() - began)
                await asyncio.sleep(max(ROUND_S / 4, pause_s))
                if self._stopping.is_set():
                    self._stop_all()
        except Exception:
            log.exception("the live view has a defect, and begins anew with who comes next")
            self._stop_all()
        finally:
            # Who comes from now on begins anew.
            self._task = None
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(intake.close)

    async def _round(self, intake: Intake) -> None:
        try:
            # Before anything is shown: they say what is masked.
            definitions = {each.name: each for each in await self.site.keys()}
        except RelatumError as error:
            self._is_away = True
            for client in self._clients:
                client.say("away", str(error))
            return
        filters = {client.by for client in self._clients}
        if filters:
            # Where nobody looks any more, those of before go on.
            is_all = any(not each.streams for each in filters)
            self._names = frozenset() if is_all else frozenset[str]().union(*(each.streams for each in filters))
        done = await self._in_thread(lambda: self._work(intake.come(self._names), filters, definitions))
        self._definitions, self._number = definitions, done.last
        self._kept.extend(done.seen)
        self._is_away = bool(done.came.away)
        for client in self._clients:
            by = client.by
            client.say(*done.came.state_for(by))
            # It may have come meanwhile.
            frame = done.made[by] if by in done.made else self._late(by, done)
            if frame is not None:
                client.put(frame)

    def _late(self, by: Filter, done: _Round) -> Frame | None:
        return self._writing.frame(by, done.seen, _passed(by, done.came), done.last, self._definitions)

    async def _in_thread(self, do: Callable[[], _Round]) -> _Round:
        return await anyio.to_thread.run_sync(do, limiter=self._limiter)

    def _work(self, came: Came, filters: Iterable[Filter], definitions: Definitions) -> _Round:
        """What each filter's clients are told of a round."""
        begin = self._number + came.passed.total()
        seen = [
            Seen(number, message, came.super_streams.get(message.stream))
            for number, message in enumerate(came.messages, begin + 1)
        ]
        last = begin + len(seen)
        made = {by: self._writing.frame(by, seen, _passed(by, came), last, definitions) for by in filters}
        return _Round(came, seen, last, made)


def _passed(by: Filter, came: Came) -> int:
    """How many messages of the streams that a filter wants were not looked at."""
    counts = came.passed.items()
    return sum(count for name, count in counts if by.has_stream(name, came.super_streams.get(name)))
