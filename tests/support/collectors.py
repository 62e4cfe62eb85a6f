"""Collectors of both faces behind the names of the blocking one, and what they are tested with."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Self

import pika
from anyio.from_thread import BlockingPortal, start_blocking_portal

from relatum.collecting import (
    AsyncMessageCollector,
    Bulk,
    Collected,
    ExecutorOptions,
    FlushReason,
    MessageCollector,
    Outcome,
    OutcomeStatus,
)

# A member of a collector without its threads, and its statements: tests import them from here alone.
from relatum.collecting import _collector_store as statements  # noqa: F401
from relatum.collecting._collector_store import CollectorStore as CollectorStore
from tests.support._waiting import wait_until
from tests.support.place import Place

UNKNOWN, COLLECTED, FORWARDED = OutcomeStatus.UNKNOWN, OutcomeStatus.COLLECTED, OutcomeStatus.FORWARDED
SUCCEEDED, FAILED, DEAD = OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD


class StoreMember:
    """A member of a collector, as of a process of its own, without its threads: the store's methods, called as it.

    Its connections are closed with the last reference to it.
    """

    def __init__(
        self, database: Any, name: str = "billing", *, types: Sequence[str] = ("order",), lease_s: float = 60, **of: Any
    ) -> None:
        self.store = CollectorStore(name, database, **of)
        weakref.finalize(self, self.store.dispose)
        self.member = self.store.open(types, lease_s)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self.store, name), self.member)

    def take_over(self, types: Sequence[str], most: int) -> list[tuple[Collected, float]]:
        return self.store.take_over(self.member, types, most)[0]

    def outcome(self, message_id: str) -> Outcome:
        return self.store.outcomes_of([message_id])[message_id]


class AsyncCollectorFace:
    """`AsyncMessageCollector` in a loop of a thread; executors and handlers are called by coroutine functions."""

    def __init__(self, portal: BlockingPortal, **options: Any) -> None:
        self._portal = portal
        self._collector = AsyncMessageCollector(**options)

    def register_executor(self, type_: str, executor: Callable[[Bulk], Any], *options: ExecutorOptions) -> None:
        async def execute(bulk: Bulk) -> Any:
            return await asyncio.to_thread(executor, bulk)

        self._collector.register_executor(type_, execute, *options)

    def register_result_handler(self, handler: Callable[[Outcome], object], **options: Any) -> None:
        async def tell(outcome: Outcome) -> None:
            handler(outcome)

        self._collector.register_result_handler(tell, **options)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """What waits is run to its end; whatever does not is the collector's own."""
        found = getattr(self._collector, name)
        if not iscoroutinefunction(found):
            return found

        def run(*arguments: Any, **options: Any) -> Any:
            return self._portal.start_task_soon(partial(found, *arguments, **options)).result(120)

        return run


COLLECTOR_FACES = ["threads", "asyncio"]


@contextmanager
def collectors_of(face: str) -> Iterator[Callable[..., Any]]:
    """What makes collectors: with threads, or with asyncio in a loop in which no task may be left behind."""
    if face == "threads":
        yield MessageCollector
        return

    async def tasks() -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    with start_blocking_portal() as portal:
        before = portal.call(tasks)
        yield partial(AsyncCollectorFace, portal)
        assert portal.call(tasks) == before


FOREVER: dict[str, Any] = {"max_age_s": 600.0, "bulk_messages": 1000}
"""Options of an executor whose bulks no limit closes."""

_OF_EXECUTORS = {each.name for each in fields(ExecutorOptions)}


class Consumer:
    """An executor that notes its bulks, and answers as configured."""

    def __init__(self, answer: Callable[[Bulk], Any] = lambda bulk: None) -> None:
        self.bulks: list[tuple[FlushReason, list[str]]] = []
        self.answer = answer

    def __call__(self, bulk: Bulk) -> Any:
        self.bulks.append((bulk.reason, [each.message.body.decode() for each in bulk.messages]))
        return self.answer(bulk)

    @property
    def bodies(self) -> list[str]:
        return [body for _, bodies in self.bulks for body in bodies]


class Gate(Consumer):
    """An executor that waits until it is let through."""

    def __init__(self) -> None:
        super().__init__(self.wait)
        self.opened = threading.Event()

    def wait(self, bulk: Bulk) -> None:
        assert self.opened.wait(90)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Open the gate at the end, whatever happens: a closed gate would hold up the collector's end."""
        try:
            yield
        finally:
            self.opened.set()


class Collecting:
    """A place, and collectors of one face that follow its stream."""

    def __init__(self, place: Place, make: Callable[..., Any] = MessageCollector) -> None:
        self.place, self._make = place, make

    def put(self, *bodies: str, type_: str | None = "order", to: str | None = None, **properties: Any) -> None:
        """Publish messages whose `message_id` is their body."""
        for_all = {"type": type_, "delivery_mode": 2} | properties
        made = [(body.encode(), pika.BasicProperties(message_id=body[:200], **for_all)) for body in bodies]
        self.place.put(*made, to=to)

    def collector(self, executor: Callable[[Bulk], Any] | None = None, **options: Any) -> Any:
        """A durable collector of the stream, by options of its own and of the executor of "order"; bulks end soon."""
        of_executor = {"max_age_s": 0.01} | {name: options.pop(name) for name in _OF_EXECUTORS & options.keys()}
        where = {"database": self.place.database, "broker": self.place.amqp, "streams": [self.place.stream]}
        collector = self._make(**{"name": "billing"} | where | options)
        if executor is not None:
            collector.register_executor("order", executor, ExecutorOptions(**of_executor))
        return collector


def is_attached(collector: Any, stream: str) -> bool:
    following = collector._shared.following
    return stream in following.streams and following.streams[stream].is_attached


def wait_status(collector: Any, status: OutcomeStatus, *ids: str) -> list[Outcome]:
    wait_until(
        lambda: {collector.outcome(message_id).status for message_id in ids} == {status}, what=f"{status} of {ids}"
    )
    return [collector.outcome(message_id) for message_id in ids]
