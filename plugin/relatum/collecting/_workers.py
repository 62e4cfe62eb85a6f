"""The threads that consume bulks: each takes one of its type, and does its steps."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from relatum import otel
from relatum.collecting._bulk import Answer, Bulk, Collected, Executor
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._collector_options import ExecutorOptions
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._consuming import Answered, BulkConsumer, Consumed, Judge, Letter, letters_of, with_refused
from relatum.collecting._shared import NAMED_MAX, Shared, log_defect
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    ReadTimeout,
    RelatumError,
)
from relatum.ids import MessageId
from relatum.otel import NO_SPAN, Description, Link, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.publishing import Burial, DeadLetters
from relatum.reading import Message, StreamReader
from relatum.reading import Result as Found

if TYPE_CHECKING:
    import sqlalchemy as sa


class BulkSpan:
    """Takes note of what becomes of a bulk, where somebody wants spans."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self._span = span

    def read(self, found: Iterable[Found]) -> None:
        """Link to those who sent messages that were left in their streams, and are read now."""
        self._span.link(lambda: otel.links_of(each for each in found if isinstance(each, Message)))

    def noting(self, executor: Executor) -> Executor:
        """The executor; what it raises is the span's error, too."""
        if self._span is NO_SPAN:
            return executor

        def execute(bulk: Bulk) -> Answer:
            try:
                return executor(bulk)
            except BaseException as error:
                self._span.failed(error)
                raise

        return execute

    def settled(self, consumed: Consumed) -> None:
        """Tell what became of the messages."""

        def counts() -> dict[str, int]:
            found = Counter(result.status for result in consumed.results)
            told = (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD)
            return {f"relatum.bulk.{status.value}": found[status] for status in told}

        self._span.tell(counts)


@contextmanager
def consuming(collector: str, bulk: Bulk) -> Iterator[BulkSpan]:
    """A span around the consumption of a bulk, where somebody wants spans."""

    def describe() -> Description:
        streams = {message.place.stream for message in bulk.messages}
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": len(bulk),
            "messaging.consumer.group.name": collector,
            "relatum.bulk.type": bulk.type,
            "relatum.bulk.reason": bulk.reason.value,
        }
        name = "process"
        if len(streams) == 1:
            name = f"process {(stream := streams.pop())}"
            attributes["messaging.destination.name"] = stream
        return Description(name, attributes, "consumer", _links_of(bulk.messages))

    with otel.span(Part.COLLECTOR, describe) as span:
        yield BulkSpan(span)


def _links_of(messages: Iterable[Collected]) -> list[Link]:
    return otel.links_of(message.body for message in messages if message.body is not None)


class _RolledBack(Exception):
    """Leaves the transaction so that it is rolled back: the executor raised (None), or some rows are another's."""

    def __init__(self, stored: Stored | None) -> None:
        super().__init__()
        self.stored = stored


Joined = tuple[list[Result], Stored | None]
"""What a joined transaction decided, and what of it was committed; None where all was rolled back."""


class JoinedRun:
    """One bulk's consumption in a joined transaction; `run` is repeated until PostgreSQL has answered.

    Exactly once rests on one statement: the one that stores the results finds the rows still forwarded in this bulk by
    this member, or the transaction is rolled back, with all the executor wrote. Another try whose commit was not
    answered, and another member, are both kept out by it.
    """

    def __init__(
        self,
        store: CollectorStore,
        member: int,
        bulk: Bulk,
        judge: Judge,
        executor: Executor,
        bury: Callable[[Sequence[Letter]], Mapping[MessageId, str]],
    ) -> None:
        self._store = store
        self._member = member
        self._bulk = bulk
        self._judge = judge
        self._executor = executor
        self._bury = bury
        self._results: list[Result] = []
        self._in_doubt: UUID | None = None
        self._failed: list[Result] = []

    def run(self) -> Joined:
        """Call the executor and commit."""
        while self._bulk.messages:
            committed = self._committed_before()
            if committed is not None:
                return committed
            end = self._attempt()
            if end is not None:
                return end
        return [], None

    def _committed_before(self) -> Joined | None:
        """What the try before committed without being answered.

        Before there is another try: what that one decides must not be taken for what this one has stored.
        """
        if self._in_doubt is None:
            return None
        came_through = self._store.came_through(self._in_doubt)
        self._in_doubt = None
        if not came_through:
            return None
        return self._results, Stored(frozenset(result.place for result in self._results), datetime.now(UTC))

    def _attempt(self) -> Joined | None:
        """One transaction; None where some messages turned out to be another member's: to be done without them."""
        bulk = self._bulk
        try:
            with self._store.transaction() as connection:
                bulk._begin_attempt(connection)
                stored = self._write(connection)
        except _RolledBack as end:
            return self._rolled_back(end.stored)
        except DatabaseUnavailable as error:
            self._in_doubt = getattr(error, "token", None)
            raise
        except Abandoned:
            raise
        except Exception as error:  # noqa: BLE001 - what the executor left behind made the transaction fail
            return self._judge((None, error)), None
        finally:
            bulk._note(connection=None)
        return self._results, stored

    def _write(self, connection: "sa.Connection") -> Stored:
        answered = call(self._executor, self._bulk)
        raised = answered[1]
        if connection.invalidated or connection.closed:
            raise DatabaseUnavailable("the executor's transaction was lost") from raised
        if not connection.in_transaction():
            raise ConfigurationError(
                "the executor ended the transaction that stores its results: what it committed is not joined with them"
            ) from raised
        results = self._judge(answered)
        if raised is not None:
            self._failed = results
            raise _RolledBack(None)
        self._results = results
        letters = letters_of(self._bulk.messages, results)
        if letters:
            self._results = results = with_refused(results, self._bury(letters))
        stored = self._store.finish(self._member, self._bulk.id, results, connection=connection)
        if len(stored.places) < len(results):
            raise _RolledBack(stored)
        return stored

    def _rolled_back(self, stored: Stored | None) -> Joined | None:
        if stored is None:
            return self._failed, None
        self._bulk._keep(stored.places)
        return None


def call(executor: Executor, bulk: Bulk) -> Answered:
    """Call an executor; whatever it raises is its answer."""
    try:
        return executor(bulk), None
    except Abandoned:
        raise
    except BaseException as error:  # noqa: BLE001 - it becomes the result of each message
        return None, error


WAIT_S = 1.0
"""How often a worker without a bulk looks up; nothing depends on it."""

T = TypeVar("T")

OpenReader = Callable[[], StreamReader]


class Worker(BulkConsumer):
    """Consumes bulks of a type, in a thread of its own."""

    def __init__(
        self,
        shared: Shared,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: Executor,
        *,
        open_reader: OpenReader | None,
        dead_letters: DeadLetters | None,
    ) -> None:
        super().__init__(options, may_die=dead_letters is not None)
        self._shared = shared
        self._type = type
        self._executor = executor
        self._open_reader = open_reader
        self._dead_letters = dead_letters
        self._reader: StreamReader | None = None
        self._span = BulkSpan()
        self.thread = threading.Thread(target=self._run, name=f"relatum-{type}", daemon=True)

    def _run(self) -> None:
        try:
            while (bulk := self._next()) is not None:
                self._take(bulk)
        finally:
            if self._reader is not None:
                self._reader.close()

    def _next(self) -> Bulk | None:
        """The next bulk; None when the collector stops and there will be none."""
        shared = self._shared
        with shared.changed:
            while True:
                if shared.abandoned.is_set():
                    return None
                bulk = shared.core.take(self._type)
                if bulk is not None:
                    # There is a place in the queue now, which somebody may wait for.
                    shared.changed.notify_all()
                    return bulk
                if shared.core.is_stopping and shared.intake.is_empty and shared.core.is_idle:
                    return None
                shared.changed.wait(WAIT_S)

    def _take(self, bulk: Bulk) -> None:
        began, consumed = time.monotonic(), Consumed([])
        # What is abandoned stays forwarded in the store: another member takes it over.
        with suppress(Abandoned), consuming(self._shared.store.name, bulk) as self._span:
            try:
                consumed = self._consumed(bulk)
            except Exception as error:  # noqa: BLE001 - one bulk must not end what consumes all others
                # They are with this member until it ends, then another member takes them over.
                places = ", ".join(str(message.place) for message in bulk.messages[:NAMED_MAX])
                log_defect(error, f"{len(bulk)} messages of type {bulk.type!r} without a stored result: {places}")
            self._span.settled(consumed)
        self._shared.settle(bulk, consumed, began)

    def _consumed(self, bulk: Bulk) -> Consumed:
        try:
            return self.consume(bulk)
        except Abandoned:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            log_defect(error, self._shared.who(f"a bulk of type {self._type!r}") + " not consumed")
            return self.fail(bulk, error)

    # --- the steps ------------------------------------------------------------------------------------------------

    def load(self, places: Sequence[MessageId]) -> Mapping[MessageId, Message | RelatumError] | None:
        return self._persist(lambda: self._if_reached(partial(self._read, places), places), "reading messages")

    def forward(self, bulk: Bulk) -> Stored:
        shared, places = self._shared, [message.place for message in bulk.messages]
        with shared.changed:
            shared.core.loaded(bulk)
        return self._persist(partial(shared.store.forward, shared.member, bulk.id, places), "forwarding a bulk")

    def execute(self, bulk: Bulk) -> Answered:
        return call(self._span.noting(self._executor), bulk)

    def join(self, bulk: Bulk, judge: Judge) -> Joined:
        shared, executor = self._shared, self._span.noting(self._executor)
        joined = JoinedRun(shared.store, shared.member, bulk, judge, executor, self._bury)
        return self._persist(joined.run, "committing results")

    def bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str] | None:
        assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
        # One burial for all tries: it knows which letters were confirmed.
        burial, places = Burial(self._dead_letters, letters), [message.id for message, _ in letters]
        return self._persist(lambda: self._if_reached(burial.run, places), "publishing dead letters")

    def finish(self, bulk: Bulk, results: Sequence[Result]) -> Stored:
        shared = self._shared
        return self._persist(partial(shared.store.finish, shared.member, bulk.id, results), "storing results")

    def _persist(self, call: Callable[[], T], what: str) -> T:
        return self._shared.persist(call, f"{what} of type {self._type!r}")

    def _if_reached(self, ask: Callable[[], T], places: Sequence[MessageId]) -> T | None:
        """Ask the broker; None where this member is cut off from it, and others have these messages instead."""
        try:
            return ask()
        except (BrokerUnavailable, ReadTimeout):
            shared = self._shared
            if shared.is_cut_off and shared.store.give_back(shared.member, places):
                return None
            raise

    def _bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str]:
        assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
        return Burial(self._dead_letters, letters).run()

    def _read(self, places: Sequence[MessageId]) -> dict[MessageId, Found]:
        assert self._open_reader is not None, "bodies are left in streams only where there is a broker"
        if self._reader is None:
            self._reader = self._open_reader()
        try:
            found = dict(zip(places, self._reader.read_all(places), strict=True))
        except RelatumError:
            self._reader.close()
            self._reader = None
            raise
        self._span.read(found.values())
        for each in found.values():
            if isinstance(each, AccessRefused):
                # That passes, or somebody sees to it: nothing is lost.
                raise each
        return found
