"""An executor in the transaction that stores its results: both are committed, or neither is."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from relatum.collecting._bulk import Bulk, Executor
from relatum.collecting._bulk_steps import Executed, Join, Joined, Letter, letters_of, with_refused
from relatum.collecting._collector_store import CollectorStore
from relatum.collecting._ports import Abandoned, Result, Stored
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.ids import MessageId

if TYPE_CHECKING:
    import sqlalchemy as sa


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
        join: Join,
        executor: Executor,
        bury: Callable[[Sequence[Letter]], Mapping[MessageId, str]],
    ) -> None:
        self._store = store
        self._member = member
        self._bulk = join.bulk
        self._judge = join.judge
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
        return Joined([], None)

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
        return Joined(self._results, Stored(frozenset(result.place for result in self._results), datetime.now(UTC)))

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
            return Joined(self._judge(Executed(raised=error)), None)
        finally:
            bulk._end_transaction()
        return Joined(self._results, stored)

    def _write(self, connection: "sa.Connection") -> Stored:
        executed = call(self._executor, self._bulk)
        if connection.invalidated or connection.closed:
            raise DatabaseUnavailable("the executor's transaction was lost") from executed.raised
        if not connection.in_transaction():
            raise ConfigurationError(
                "the executor ended the transaction that stores its results: what it committed is not joined with them"
            ) from executed.raised
        results = self._judge(executed)
        if executed.raised is not None:
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
            return Joined(self._failed, None)
        self._bulk._keep(stored.places)
        return None


def call(executor: Executor, bulk: Bulk) -> Executed:
    """Call an executor; whatever it raises is its answer."""
    try:
        return Executed(executor(bulk))
    except Abandoned:
        raise
    except BaseException as error:  # noqa: BLE001 - it becomes the result of each message
        return Executed(raised=error)
