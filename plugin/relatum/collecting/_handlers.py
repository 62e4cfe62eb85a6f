"""Result handlers, and the detection of code that a collector called as an executor or a handler."""

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

from relatum.outcomes import Outcome, OutcomeStatus, call_handler

if TYPE_CHECKING:
    from relatum.collecting._bulk import Collected
    from relatum.collecting._collector_core import Result

logger = logging.getLogger("relatum.collector")

Handler = Callable[[Outcome], object]
"""Called with an outcome: first `collected`, later the final one. May be a coroutine function with asyncio."""


class Handlers:
    """Result handlers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by: dict[tuple[str | None, str | None], list[Handler]] = {}

    def register(self, handler: Handler, *, type: str | None = None, message_id: str | None = None) -> None:  # noqa: A002
        """Add a handler of a message, a type or all messages. A final outcome removes its message's handlers."""
        with self._lock:
            self._by.setdefault((type, message_id), []).append(handler)

    def __bool__(self) -> bool:
        """Whether there is any handler. Without one, callers create no outcomes."""
        return bool(self._by)

    def notify(self, outcomes: Iterable[Outcome]) -> None:
        """Call the handlers of each outcome. A handler's exception is logged and affects nothing else."""
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                # Catch exits, too: they would end the call that stores results, not the program.
                call_handler(handler, outcome, caught=BaseException)

    async def notify_async(self, outcomes: Iterable[Outcome]) -> None:
        """Like `notify`, but awaits handlers in the running loop. Exits and a cancellation propagate."""
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        for outcome in outcomes:
            for handler in self._handlers_of(outcome):
                try:
                    answer = handler(outcome)
                    if isawaitable(answer):
                        await answer
                except (SystemExit, KeyboardInterrupt, GeneratorExit):
                    raise
                except BaseException as error:
                    if isinstance(error, asyncio.CancelledError) and task.cancelling():
                        raise
                    logger.exception("a result handler failed", extra={"message_id": outcome.message_id})

    def _handlers_of(self, outcome: Outcome) -> list[Handler]:
        with self._lock:
            of_message = self._by.get((None, outcome.message_id), [])
            if outcome.is_final:
                self._by.pop((None, outcome.message_id), None)
            return [*of_message, *self._by.get((outcome.type, None), ()), *self._by.get((None, None), ())]


def outcome_of(
    collector: str, message: "Collected", result: "Result | None" = None, at: datetime | None = None
) -> Outcome:
    """Return the outcome for handlers: `collected` without a result, else the result of an attempt."""
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
class CollectorCall:
    """A collector's call of an executor or of handlers. The called code must not wait for the call's end."""

    collector: object
    is_storing: bool
    """Whether the collector stores no further message until this call ends."""


_current: "ContextVar[CollectorCall | None]" = ContextVar("relatum_collector_call", default=None)


@contextmanager
def collector_call(collector: object, *, is_storing: bool = False) -> Iterator[None]:
    """Mark the code that the block runs, in this thread and in tasks that it starts, until the block ends."""
    call = CollectorCall(collector, is_storing)
    token = _current.set(call)
    try:
        yield
    finally:
        # Tasks may continue with a copy of the context, but no longer count as this call.
        call.collector = None
        _current.reset(token)


def current_call(collector: object) -> CollectorCall | None:
    """Return the collector's call that runs this code; None if there is none."""
    call = _current.get()
    return call if call is not None and call.collector is collector else None
