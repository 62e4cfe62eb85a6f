"""Telling handlers of messages' outcomes: one thread asks for all of them at once."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from relatum.errors import RelatumError
from relatum.outcomes._outcome_values import Outcome, OutcomeStatus
from relatum.waiting import Outages

logger = logging.getLogger("relatum.collector")

POLL_LAST_S: Final = 0.1
"""Seconds between two questions at most: what a final outcome can come late by."""

_WHO: Final = "asking for outcomes that handlers wait for"


@dataclass(slots=True)
class _Handler:
    """A handler, and the status it was last told."""

    call: Callable[[Outcome], object]
    told: tuple[OutcomeStatus, int] = (OutcomeStatus.UNKNOWN, 0)


class OutcomeWatch:
    """The thread that asks for all messages somebody has a handler for."""

    def __init__(self, read: Callable[[list[str], str | None], Mapping[str, Outcome]], database: str) -> None:
        self._read = read
        self._outages = Outages(logger, database=database)
        self._changed = threading.Condition()
        self._handlers: dict[tuple[str | None, str], list[_Handler]] = {}
        self._is_new = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="relatum-outcomes", daemon=True)
        self._thread.start()

    def add(self, message_id: str, collector: str | None, handler: Callable[[Outcome], object]) -> None:
        with self._changed:
            self._handlers.setdefault((collector, message_id), []).append(_Handler(handler))
            self._is_new = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting()) is not None:
            for collector in {collector for collector, _ in waiting}:
                ids = [message_id for named, message_id in waiting if named == collector]
                try:
                    found = self._read(ids, collector)
                except RelatumError as error:
                    self._outages.failed(_WHO, error)
                    continue
                self._outages.over(_WHO)
                for outcome in found.values():
                    self._tell(collector, outcome)

    def _waiting(self) -> list[tuple[str | None, str]] | None:
        """What to ask for now; None at the end."""
        with self._changed:
            while not self._is_stopping and not self._handlers:
                self._changed.wait()
            if not self._is_new and not self._is_stopping:
                self._changed.wait(POLL_LAST_S)
            self._is_new = False
            return None if self._is_stopping else list(self._handlers)

    def _tell(self, collector: str | None, outcome: Outcome) -> None:
        key = (collector, outcome.message_id)
        status = (outcome.status, outcome.attempts)
        with self._changed:
            handlers = [handler for handler in self._handlers.get(key, ()) if handler.told != status]
            for handler in handlers:
                handler.told = status
            if outcome.is_final:
                del self._handlers[key]
        for handler in handlers:
            # Exits, too: they would end this thread, and no handler would be called any more.
            call_handler(handler.call, outcome, caught=BaseException)


def call_handler(
    handler: Callable[[Outcome], object], outcome: Outcome, *, caught: type[BaseException] = Exception
) -> None:
    """Call a result handler; what it raises is logged and breaks nothing. In an event loop an exit ends the loop."""
    try:
        handler(outcome)
    except caught:
        logger.exception("a result handler raised for message %s (%s)", outcome.message_id, outcome.status.value)
