"""The asyncio collector behind the names of the blocking one, so that each behaviour is written down once."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from relatum.collecting import AsyncMessageCollector, Bulk, ExecutorOptions, Outcome

# A member of a collector without its threads: tests have it from here alone.
from relatum.collecting._collector_store import CollectorStore as CollectorStore
from relatum.reading import Message

T = TypeVar("T")


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tests-loop")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def close(self) -> list[str]:
        """End the loop; gives the names of the tasks that were left behind."""
        left = self.run(_others())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(90)
        self.loop.close()
        return left


async def _others() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@contextmanager
def a_loop() -> Iterator[Loop]:
    """A loop in which nothing may be left at the end."""
    loop = Loop()
    try:
        yield loop
    finally:
        left = loop.close()
    assert left == []


class AsyncCollectorFace:
    """`AsyncMessageCollector` in a loop of a thread; executors and handlers are called by coroutine functions."""

    def __init__(self, loop: Loop, **options: Any) -> None:
        self._loop = loop
        self._collector = AsyncMessageCollector(**options)
        self._shared = self._collector._shared

    def register_executor(
        self,
        type: str,  # noqa: A002
        executor: Callable[[Bulk], Any],
        options: ExecutorOptions = ExecutorOptions(),
    ) -> None:
        """Register a coroutine function that calls the executor."""

        async def execute(bulk: Bulk) -> Any:
            return await asyncio.to_thread(executor, bulk)

        self._collector.register_executor(type, execute, options)

    def register_result_handler(self, handler: Callable[[Outcome], object], **options: Any) -> None:
        """Register a coroutine function that calls the handler."""

        async def tell(outcome: Outcome) -> None:
            handler(outcome)

        self._collector.register_result_handler(tell, **options)

    def collect(self, message: Message, **options: Any) -> bool:
        """See `MessageCollector.collect`."""
        return self._loop.run(self._collector.collect(message, **options))

    def collect_many(self, messages: Iterable[Message], **options: Any) -> list[bool]:
        """See `MessageCollector.collect_many`."""
        return self._loop.run(self._collector.collect_many(messages, **options))

    def flush(self, type: str | None = None) -> None:  # noqa: A002
        """See `MessageCollector.flush`."""
        self._loop.run(self._collector.flush(type))

    def outcome(self, message_id: str) -> Outcome:
        """See `MessageCollector.outcome`."""
        return self._loop.run(self._collector.outcome(message_id))

    def start(self) -> None:
        """See `MessageCollector.start`."""
        self._loop.run(self._collector.start())

    def close(self, timeout_s: float = 30.0) -> bool:
        """See `MessageCollector.close`."""
        return self._loop.run(self._collector.close(timeout_s))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Whatever does not wait is the collector's own."""
        return getattr(self._collector, name)
