"""Both readers behind one blocking face, so that each behaviour is written down once."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from relatum import MessageId
from relatum.reading import AsyncStreamReader, Message, StreamReader
from tests.support._waiting import result_of
from tests.support.relations import OnLoop

FACES = ("blocking", "asyncio")


class Face(OnLoop):
    """A `StreamReader`, or an `AsyncStreamReader` in a loop of its own; other methods are the reader's own."""

    def __init__(self, name: str, reader: Any, runner: asyncio.Runner) -> None:
        super().__init__(runner, reader)
        self.name = name

    def _listed(self, source: Any, take: int | None, each: Callable[[Any], object] = lambda _: None) -> list[Any]:
        if hasattr(source, "__aiter__"):
            return result_of(self._runner, _collected(source, take, each))  # type: ignore[no-any-return]
        found = []
        with contextlib.closing(source):
            for item in islice(source, take):
                each(item)
                found.append(item)
        return found

    def read_many(self, ids: Iterable[MessageId], *, take: int | None = None, **options: Any) -> list[Any]:
        return self._listed(self._asked.read_many(ids, **options), take)

    def iterate(self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any) -> list[Message]:
        return self._listed(self._asked.iterate(stream, start, **options), take)

    def follow(self, stream: str, each: Callable[[Message], object], **options: Any) -> None:
        self._listed(self._asked.iterate(stream, follow=True, **options), None, each)

    def batches(self, stream: str, start: Any = "first", *, take: int | None = None, **options: Any) -> list[Any]:
        return self._listed(self._asked.batches(stream, start, **options), take)


async def _collected(source: Any, take: int | None, each: Callable[[Any], object]) -> list[Any]:
    found: list[Any] = []
    async with contextlib.aclosing(source) as items:
        async for item in items:
            each(item)
            found.append(item)
            if len(found) == take:
                break
    return found


@contextlib.contextmanager
def open_face(name: str, broker: Any, **options: Any) -> Iterator[Face]:
    with asyncio.Runner() as runner:
        if name == "blocking":
            with StreamReader.open(broker, **options) as reader:
                yield Face(name, reader, runner)
            return
        opened = runner.run(AsyncStreamReader.open(broker, **options))
        try:
            yield Face(name, opened, runner)
        finally:
            runner.run(opened.close())


def open_and_close(name: str, broker: Any, **options: Any) -> None:
    with open_face(name, broker, **options):
        pass


def ways(face: Face, stream: str) -> list[Callable[[], object]]:
    return [
        lambda: face.read(stream, 0),
        lambda: face.bounds(stream),
        lambda: face.iterate(stream),
        lambda: face.iterate(stream, follow=True, idle_timeout_s=1),
        lambda: face.batches(stream, take=1),
    ]
