"""Who is told of outcomes; and whether what runs now is an executor or a handler that a collector has called."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from inspect import isawaitable
from typing import TYPE_CHECKING

from relatum.outcomes import Outcome, OutcomeStatus

if TYPE_CHECKING:
    from relatum.collecting._bulk import Collected
    from relatum.collecting._collector_core import Result

logger = logging.getLogger("relatum.collector")

Handler = Callable[[Outcome], object]
"""Is called with an outcome: first `collected`, later the final one. With asyncio it may be a coroutine function."""


class Handlers:
    """Result handlers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_all: list[Handler] = []
        self._of_type: dict[str, list[Handler]] = {}
        self._of_message: dict[str, list[Handler]] = {}

    def register(self, handler: Handler, *, type: str | None = None, message_id: str | None = None) -> None:  # noqa: A002
        """Add a handler: of a message, of a type, or of everything. One of a message goes after its final outcome."""
        with self._lock:
            if message_id is not None:
                self._of_message.setdefault(message_id, []).append(handler)
            elif type is not None:
                self._of_type.setdefault(type, []).append(handler)
            else:
                self._of_all.append(handler)

    def is_wanted(self, type: str) -> bool:  # noqa: A002
        """Whether outcomes of a type may have a handler; cheap, so that nothing is made that nobody hears."""
        return bool(self._of_all or self._of_message or type in self._of_type)

    def tell(self, outcomes: Iterable[Outcome]) -> None:
        """Call the handlers of each outcome. One that raises is logged; the others, and all else, go on."""
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                try:
                    handler(outcome)
                except BaseException:
                    # Exits, too: they would end the call that stores, or a worker's, and nothing else.
                    logger.exception("a result handler failed", extra={"message_id": outcome.message_id})

    async def tell_async(self, outcomes: Iterable[Outcome]) -> None:
        """Call the handlers of each outcome in the running loop; what they return is awaited where it can be.

        As for `tell`, but that an exit ends the loop, and a cancellation of this task the call.
        """
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                try:
                    answer = handler(outcome)
                    if isawaitable(answer):
                        await answer
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        raise
                    logger.exception("a result handler failed", extra={"message_id": outcome.message_id})

    def _handlers_of(self, outcome: Outcome) -> list[Handler]:
        with self._lock:
            of_message = self._of_message.get(outcome.message_id, [])
            if outcome.is_final:
                self._of_message.pop(outcome.message_id, None)
            return [*of_message, *self._of_type.get(outcome.type or "", ()), *self._of_all]


def outcome_of(
    collector: str, message: "Collected", result: "Result | None" = None, at: datetime | None = None
) -> Outcome:
    """What handlers are told of a message: after an attempt, or, without a result, when it was stored."""
    status = OutcomeStatus.COLLECTED if result is None else result.status
    return Outcome(
        message.message_id,
        status,
        collector,
        message.type,
        message.place.stream,
        message.place.offset,
        message.attempts,
        None if result is None else result.reason,
        message.collected_at,
        message.forwarded_at,
        at if status.is_final else None,
    )


@dataclass(slots=True, eq=False)
class Inside:
    """A call of an executor or of handlers, which may call their collector: it must not wait for what waits for it.

    `collector` is whose it is; `is_storing` says that storing goes on only after it.
    """

    collector: object
    is_storing: bool


_current: "ContextVar[Inside | None]" = ContextVar("relatum_collector_call", default=None)


@contextmanager
def inside(collector: object, *, is_storing: bool = False) -> Iterator[None]:
    """Mark what is called in the block, in this thread and in tasks that it begins for it, until the block is left."""
    call = Inside(collector, is_storing)
    token = _current.set(call)
    try:
        yield
    finally:
        # What goes on with a copy of the context is nobody's call any more.
        call.collector = None
        _current.reset(token)


def call_of(collector: object) -> Inside | None:
    """The call of this collector's that runs now; None for code of anybody else's."""
    call = _current.get()
    return call if call is not None and call.collector is collector else None
