"""PostgreSQL as tasks ask it, each statement in a thread of its own."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relatum.errors import UsedAfterClose
from relatum.processes import after_fork, leave_to_parent
from relatum.store._database import CLOSED, AnyDatabase, Database, Rows
from relatum.store._pool import no_connection
from relatum.waiting import Deadline, current, in_thread, left_s, within


class AsyncDatabase:
    """PostgreSQL as the tasks of one component use it, by statements that are transactions of their own.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        refusing: What `UsedAfterClose` says once it is closed.
        pool_size: As for `Database`.
        connections_max: As for `Database`; of a shared database so many connections are asked for at once.
        is_kept: As for `Database`.

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
        self.address = self._database.address
        self._refusing = refusing
        self._most = 2 * pool_size if connections_max is None else connections_max
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
        with within(ending):
            await self._turn()
            try:
                if self._ending.has_passed:
                    raise UsedAfterClose(self._refusing)
                return await in_thread(self._threads, self._database.rows, statement, parameters)
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

    async def close(self) -> None:
        """End what is under way, and give the connections back. A shared database stays as it is."""
        self._ending.end_in(0)
        await asyncio.to_thread(self._threads.shutdown)
        self._database.close()
