"""What surrounds an executor: a span, where somebody wants spans, and the transaction that it joins."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from relatum import otel
from relatum.collecting._bulk import Answer, Bulk, Collected, Executor, Failure
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._collector_store import CollectorStore
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.ids import MessageId
from relatum.otel import NO_SPAN, Description, Link, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message

if TYPE_CHECKING:
    import sqlalchemy as sa

    from relatum.collecting._consuming import Consumed

Answered = tuple[Any, BaseException | None]
"""What an executor returned, and what it raised instead."""

Judge = Callable[[Answered], list[Result]]
"""Decides what to store of a bulk's messages by what its executor came to."""


class BulkSpan:
    """Takes note of what becomes of a bulk, where somebody wants spans."""

    def __init__(self, span: Span = NO_SPAN) -> None:
        self._span = span

    def read(self, found: Iterable[Message | None]) -> None:
        """Link to those who sent messages that were left in their streams, and are read now."""
        self._span.link(lambda: otel.links_of(each for each in found if each is not None))

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

    def settled(self, consumed: "Consumed") -> None:
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


Letter = tuple[Message, str]
"""A message for the dead-letter stream, and why."""


def letters_of(messages: Sequence[Collected], results: Sequence[Result]) -> list[Letter]:
    """The messages that go to the dead-letter stream, each with its reason."""
    reasons = {result.place: result.reason or "" for result in results if result.status is OutcomeStatus.DEAD}
    return [(message.message, reasons[message.place]) for message in messages if message.place in reasons]


def with_refused(results: Sequence[Result], refused: Mapping[MessageId, str]) -> list[Result]:
    """Results, where the dead-letter stream took some messages at no time: those failed, and both reasons are kept."""
    return [
        result
        if result.place not in refused
        else replace(
            result,
            status=OutcomeStatus.FAILED,
            reason=Failure(f"{result.reason}; no dead letter: {refused[result.place]}").stored_reason,
        )
        for result in results
    ]


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
