"""The call of an executor, and the transaction that one joins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from relatum.collecting._bulk import Bulk, Executor, Failure
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._collector_store import CollectorStore
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.ids import MessageId
from relatum.otel import NO_SPAN, Span
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message

if TYPE_CHECKING:
    import sqlalchemy as sa

Answered = tuple[Any, BaseException | None]
"""What an executor returned, and what it raised instead."""

Letter = tuple[Message, str]
"""A message for the dead-letter stream, and why."""


def call(executor: Executor, bulk: Bulk, span: Span) -> Answered:
    """Call an executor; whatever it raises is its answer, and the span's error."""
    try:
        return executor(bulk), None
    except BaseException as error:
        span.failed(error)
        if isinstance(error, Abandoned):
            raise
        return None, error


def letters_of(bulk: Bulk, results: Sequence[Result]) -> list[Letter]:
    """The messages that go to the dead-letter stream, each with its reason."""
    reasons = {result.place: result.reason or "" for result in results if result.status is OutcomeStatus.DEAD}
    return [(message.message, reasons[message.place]) for message in bulk.messages if message.place in reasons]


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
        judge: Callable[[Answered], list[Result]],
        executor: Executor,
        bury: Callable[[Sequence[Letter]], Mapping[MessageId, str]],
        span: Span = NO_SPAN,
    ) -> None:
        self._store = store
        self._member = member
        self._bulk = bulk
        self._judge = judge
        self._executor = executor
        self._bury = bury
        self._span = span
        self._results: list[Result] = []
        self._in_doubt: UUID | None = None

    def run(self) -> tuple[list[Result], Stored | None]:
        """Call the executor and commit; gives the results, and what of them was committed: None where nothing was."""
        # What the try before decided must not be taken for what this one stores.
        if (token := self._in_doubt) is not None:
            came_through = self._store.came_through(token)
            self._in_doubt = None
            if came_through:
                return self._results, Stored(frozenset(each.place for each in self._results), datetime.now(UTC))
        while self._bulk.messages:
            try:
                with self._store.transaction() as connection:
                    self._bulk._begin_attempt(connection)
                    stored = self._write(connection)
            except _RolledBack as end:
                if end.stored is None:
                    return self._results, None
                # Some messages turned out to be another member's: once more, without them.
                self._bulk._keep(end.stored.places)
            except DatabaseUnavailable as error:
                self._in_doubt = getattr(error, "token", None)
                raise
            except Abandoned:
                raise
            except Exception as error:  # noqa: BLE001 - what the executor left behind made the transaction fail
                return self._judge((None, error)), None
            else:
                return self._results, stored
            finally:
                self._bulk._note(connection=None)
        return [], None

    def _write(self, connection: "sa.Connection") -> Stored:
        answered = call(self._executor, self._bulk, self._span)
        raised = answered[1]
        if connection.invalidated or connection.closed:
            raise DatabaseUnavailable("the executor's transaction was lost") from raised
        if not connection.in_transaction():
            raise ConfigurationError(
                "the executor ended the transaction that stores its results: what it committed is not joined with them"
            ) from raised
        self._results = self._judge(answered)
        if raised is not None:
            raise _RolledBack(None)
        letters = letters_of(self._bulk, self._results)
        if letters:
            self._results = with_refused(self._results, self._bury(letters))
        stored = self._store.finish(self._member, self._bulk.id, self._results, connection=connection)
        if len(stored.places) < len(self._results):
            raise _RolledBack(stored)
        return stored
