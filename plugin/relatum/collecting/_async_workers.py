"""The tasks that consume bulks: each takes one of its type, and does its steps."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from relatum.collecting._async_executing import AsyncExecutor, FromThread, call_executor
from relatum.collecting._async_following import OpenAsyncReader
from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._bulk import Bulk
from relatum.collecting._bulk_steps import (
    Bury,
    Consumed,
    Execute,
    Finish,
    Forward,
    Join,
    Joined,
    Letter,
    Load,
    Step,
    Steps,
    consume,
    fail,
)
from relatum.collecting._collector_options import ExecutorOptions
from relatum.collecting._collector_state import log_defect
from relatum.collecting._joined import JoinedRun
from relatum.collecting._workers import WAIT_S, not_refused, undecided
from relatum.errors import RelatumError
from relatum.ids import MessageId
from relatum.publishing import Burial, DeadLetters
from relatum.reading import AsyncStreamReader
from relatum.reading import Result as Found
from relatum.steps import async_run


class AsyncWorker:
    """Consumes bulks of a type, in a task of its own.

    Args:
        shared: What the collector's tasks share.
        options: The type's options.
        executor: The type's executor.
        open_reader: Opens a reader for bodies that are not in memory; None where there is no broker.
        dead_letters: Where messages go that are given up; None for nowhere.
    """

    def __init__(
        self,
        shared: AsyncShared,
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: AsyncExecutor,
        *,
        open_reader: OpenAsyncReader | None,
        dead_letters: DeadLetters | None,
    ) -> None:
        self._shared = shared
        self._type = type
        self._options = options
        self._executor = executor
        self._open_reader = open_reader
        self._dead_letters = dead_letters
        self._reader: AsyncStreamReader | None = None
        self.task = asyncio.create_task(self._run(), name=f"relatum-{type}")

    async def _run(self) -> None:
        try:
            while (bulk := await self._next()) is not None:
                await self._consume(bulk)
        finally:
            if self._reader is not None:
                await self._reader.close()

    async def _next(self) -> Bulk | None:
        """The next bulk; None when the collector stops and there will be none."""
        shared = self._shared
        while True:
            bulk = shared.core.take(self._type)
            if bulk is not None:
                # There is a place in the queue now, which somebody may wait for.
                shared.changed.notify()
                return bulk
            if shared.core.is_stopping and shared.intake.is_empty and shared.core.is_idle:
                return None
            await shared.changed.wait(WAIT_S)

    async def _consume(self, bulk: Bulk) -> None:
        # Cancelled on the way, it stays forwarded in the store: another member takes it over.
        began, consumed = time.monotonic(), Consumed([], None)
        try:
            consumed = await self._consumed(bulk)
        except Exception as error:  # noqa: BLE001 - one bulk must not end what consumes all others
            undecided(bulk, error)
        await self._shared.tell_consumed(bulk.taken, consumed)
        self._shared.settled(bulk, consumed, began)
        self._shared.changed.notify()

    async def _consumed(self, bulk: Bulk) -> Consumed:
        try:
            return await self._steps(bulk, consume(self._options, bulk, may_die=self._dead_letters is not None))
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            log_defect(error, self._shared.who(f"a bulk of type {self._type!r}") + " not consumed")
            return await self._steps(bulk, fail(self._options, bulk, error))

    async def _steps(self, bulk: Bulk, steps: Steps) -> Consumed:
        return await async_run(steps, lambda step: self._perform(step, bulk))

    async def _perform(self, step: Step, bulk: Bulk) -> Any:
        shared, member, doing = self._shared, self._shared.member, self._doing
        match step:
            case Load(places):
                return await shared.persist(partial(self._load, places), doing("reading messages"))
            case Forward(bulk_id, places):
                shared.core.loaded(bulk)
                forward = partial(shared.store.forward, member, bulk_id, places)
                return await shared.persist_in_thread(forward, doing("forwarding a bulk"))
            case Execute(of):
                return await call_executor(shared, self._executor, of)
            case Join():
                return await self._join(member, step)
            case Bury(letters):
                assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
                burial = Burial(self._dead_letters, letters)
                return await shared.persist_in_thread(burial.run, doing("publishing dead letters"))
            case Finish(bulk_id, results):
                finish = partial(shared.store.finish, member, bulk_id, results)
                return await shared.persist_in_thread(finish, doing("storing results"))

    async def _join(self, member: int, step: Join) -> Joined:
        executor = FromThread(self._executor)
        run = JoinedRun(self._shared.store, member, step, executor, self._bury)
        try:
            return await self._shared.persist_in_thread(run.run, self._doing("committing results"))
        except asyncio.CancelledError:
            executor.cancel()
            raise

    def _doing(self, what: str) -> str:
        return f"{what} of type {self._type!r}"

    def _bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str]:
        assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
        return Burial(self._dead_letters, letters).run()

    async def _load(self, places: Sequence[MessageId]) -> dict[MessageId, Found]:
        assert self._open_reader is not None, "bodies are left in streams only where there is a broker"
        if self._reader is None:
            self._reader = await self._open_reader()
        try:
            read = await self._reader.read_all(places)
        except RelatumError:
            await self._reader.close()
            self._reader = None
            raise
        return not_refused(dict(zip(places, read, strict=True)))
