"""Both readers behind one blocking face, so that each behaviour is written down once."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice
from typing import Any, Protocol, TypeVar

from relatum import MessageId
from relatum.reading import (
    AsyncStreamReader,
    BrokerAddress,
    KeptChunks,
    Message,
    RecordBatch,
    StreamBounds,
    StreamReader,
)

_Result = TypeVar("_Result")

FACES = ("blocking", "asyncio")


class Face(Protocol):
    """A reader as the tests use it."""

    name: str

    def read(self, stream: str, offset: int) -> Message: ...
    def read_many(self, ids: Iterable[MessageId], *, take: int | None = None, **options: Any) -> list[Any]: ...
    def iterate(
        self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any
    ) -> list[Message]: ...
    def follow(self, stream: str, each: Callable[[Message], object], **options: Any) -> None: ...
    def batches(self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any) -> list[Any]: ...
    def bounds(self, stream: str) -> StreamBounds: ...
    def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks | None = None, lasts: Collection[str] = ()
    ) -> dict[str, StreamBounds]: ...
    def read_all(self, ids: Iterable[MessageId], *, kept: KeptChunks | None = None) -> list[Any]: ...
    def partitions(self, super_stream: str) -> list[str]: ...
    def routes(self, exchange: str, routing_key: str) -> list[str] | None: ...


class BlockingFace:
    """`StreamReader` itself."""

    def __init__(self, name: str, reader: StreamReader) -> None:
        self.name = name
        self._reader = reader
        self.read = reader.read
        self.bounds = reader.bounds
        self.all_bounds = reader.all_bounds
        self.read_all = reader.read_all
        self.partitions = reader.partitions
        self.bound = reader.bound
        self.routes = reader.routes

    def read_many(self, ids: Iterable[MessageId], *, take: int | None = None, **options: Any) -> list[Any]:
        with contextlib.closing(self._reader.read_many(ids, **options)) as results:  # type: ignore[type-var]
            return list(islice(results, take))

    def iterate(self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any) -> list[Message]:
        with contextlib.closing(self._reader.iterate(stream, start, **options)) as messages:
            return list(islice(messages, take))

    def follow(self, stream: str, each: Callable[[Message], object], **options: Any) -> None:
        with contextlib.closing(self._reader.iterate(stream, follow=True, **options)) as messages:
            for message in messages:
                each(message)

    def batches(
        self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any
    ) -> list[RecordBatch | None]:
        with contextlib.closing(self._reader.batches(stream, start, **options)) as batches:
            return list(islice(batches, take))


class AsyncFace:
    """`AsyncStreamReader` in a loop of its own."""

    def __init__(self, name: str, runner: asyncio.Runner, reader: AsyncStreamReader) -> None:
        self.name = name
        self._runner = runner
        self._reader = reader

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        # In the context of the call: a runner has one of its own.
        return self._runner.run(coroutine, context=copy_context())

    def read(self, stream: str, offset: int) -> Message:
        return self._run(self._reader.read(stream, offset))

    def bounds(self, stream: str) -> StreamBounds:
        return self._run(self._reader.bounds(stream))

    def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks | None = None, lasts: Collection[str] = ()
    ) -> dict[str, StreamBounds]:
        return self._run(self._reader.all_bounds(streams, kept, lasts))

    def read_all(self, ids: Iterable[MessageId], *, kept: KeptChunks | None = None) -> list[Any]:
        return self._run(self._reader.read_all(ids, kept=kept))

    def partitions(self, super_stream: str) -> list[str]:
        return self._run(self._reader.partitions(super_stream))

    def bound(self, exchange: str) -> list[str]:
        return self._run(self._reader.bound(exchange))

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        return self._run(self._reader.routes(exchange, routing_key))

    def read_many(self, ids: Iterable[MessageId], *, take: int | None = None, **options: Any) -> list[Any]:
        return self._run(_collect(self._reader.read_many(ids, **options), take))

    def iterate(self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any) -> list[Message]:
        return self._run(_collect(self._reader.iterate(stream, start, **options), take))

    def follow(self, stream: str, each: Callable[[Message], object], **options: Any) -> None:
        async def follow() -> None:
            async with contextlib.aclosing(self._reader.iterate(stream, follow=True, **options)) as messages:
                async for message in messages:
                    each(message)

        self._run(follow())

    def batches(
        self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any
    ) -> list[RecordBatch | None]:
        return self._run(_collect(self._reader.batches(stream, start, **options), take))


async def _collect(source: Any, take: int | None) -> list[Any]:
    found: list[Any] = []
    async with contextlib.aclosing(source) as items:
        if take == 0:
            return found
        async for item in items:
            found.append(item)
            if len(found) == take:
                break
    return found


@contextlib.contextmanager
def open_face(name: str, url: str | BrokerAddress, **options: Any) -> Iterator[Face]:
    """Open one of the readers."""
    if name == "blocking":
        with StreamReader.open(url, **options) as reader:
            yield BlockingFace(name, reader)
        return
    with asyncio.Runner() as runner:
        opened = runner.run(AsyncStreamReader.open(url, **options))
        try:
            yield AsyncFace(name, runner, opened)
        finally:
            runner.run(opened.close())
