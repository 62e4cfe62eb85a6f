"""PostgreSQL as tasks ask it: statements by themselves, carried out in the event loop on the connections of a pool.

psycopg's statements are steps that say when they wait, and for what. In a thread psycopg waits; in a task the loop
does, on the very same connection. So one pool, one rule of what is repeated and one look at each session serve both
faces, and a statement costs no change of threads. Connecting does block: that alone is done in a thread.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Final

from relatum.errors import UsedAfterClose
from relatum.processes import after_fork, leave_to_parent
from relatum.store._database import CLOSED, TRIES, AnyDatabase, Database, Rows, Text
from relatum.store._kept import Lent
from relatum.store._translation import translated_errors
from relatum.store._waiting import TimedConnection, no_connection
from relatum.waiting import Deadline, current, left_s, within

_ROWS: Final = 1_000
"""Rows taken over at a time, after which other tasks go on: a millisecond or two."""


class AsyncDatabase:
    """PostgreSQL as the tasks of one component use it, by statements that are transactions of their own.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        refusing: What `UsedAfterClose` says once it is closed.
        pool_size: As for `make_engine`.
        connections_max: As for `make_engine`; of a shared database so many connections are asked for at once.
        is_kept: As for `make_engine`.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL.
    """

    def __init__(
        self,
        database: AnyDatabase,
        *,
        refusing: str = CLOSED,
        pool_size: int = 5,
        connections_max: int | None = None,
        is_kept: bool = True,
    ) -> None:
        self._database = Database(
            database, refusing=refusing, pool_size=pool_size, connections_max=connections_max, is_kept=is_kept
        )
        self._refusing = refusing
        self.engine = self._database.engine
        self._kept = self._database.kept
        self._most = self._kept.most or (2 * pool_size if connections_max is None else connections_max)
        self._begin()
        after_fork(self, AsyncDatabase._renew)

    def _begin(self) -> None:
        self._ending = Deadline(None)
        self._turns = asyncio.Semaphore(self._most)
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="relatum-database")

    def _renew(self) -> None:
        """In a child: the threads are the parent's, and so is who has a turn. Connections see to themselves."""
        leave_to_parent(self._threads)
        self._begin()

    async def rows(self, statement: Any, parameters: Mapping[str, Any]) -> Rows:
        """The rows a statement gives; see `Database.rows`. Cancelled, it leaves no statement and no session behind.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, or no connection became free in time.
            UsedAfterClose: it was closed.
        """
        outer = current()
        ending = Deadline(None, self._ending) if outer is None else Deadline(None, outer, self._ending)
        with within(ending), translated_errors():
            await self._turn()
            try:
                if self._ending.has_passed:
                    raise UsedAfterClose(self._refusing)
                return await self._carried_out(*self._database.asked(statement, parameters))
            finally:
                self._turns.release()

    async def _turn(self) -> None:
        """Wait for a turn; who has one finds a connection, or may open one."""
        if not self._turns.locked():
            await self._turns.acquire()
            return
        try:
            async with asyncio.timeout(left_s()):
                await self._turns.acquire()
        except TimeoutError:
            raise no_connection() from None

    async def _carried_out(self, text: Text, given: Mapping[str, Any]) -> Rows:
        for tries_left in reversed(range(TRIES)):
            lent = self._kept.take_idle() or await self._opened()
            try:
                rows = await _executed(lent.driver, text.on(lent.driver), given)
            except BaseException as error:
                if not self._database.may_go_on(lent, error) or not tries_left:
                    raise
            else:
                self._kept.give_back(lent)
                return rows
        raise AssertionError("the last try returns or raises")

    async def _opened(self) -> Lent:
        """A connection of the pool, which may have to be opened or waited for."""
        with within(None) as deadline:
            taken = self._threads.submit(copy_context().run, self._kept.take)
            try:
                return await asyncio.wrap_future(taken)
            except BaseException:
                # Nobody waits for it any more; where it comes all the same, it is for others.
                deadline.end_in(0)
                taken.add_done_callback(self._give_back)
                raise

    def _give_back(self, taken: "Future[Lent]") -> None:
        if not taken.cancelled() and taken.exception() is None:
            self._kept.give_back(taken.result())

    async def close(self) -> None:
        """End what is under way, and give the connections back. A shared database stays as it is."""
        self._ending.end_in(0)
        await asyncio.to_thread(self._threads.shutdown)
        self._database.close()


async def _executed(driver: TimedConnection, sql: bytes, given: Mapping[str, Any]) -> Rows:
    cursor = driver.cursor()
    await driver.wait_in_task(cursor._execute_gen(sql, given))
    if cursor.pgresult is None or not cursor.pgresult.nfields:
        return []
    rows = cursor.fetchmany(_ROWS)
    while len(rows) < cursor.rowcount:
        await asyncio.sleep(0)
        rows += cursor.fetchmany(_ROWS)
    return rows
