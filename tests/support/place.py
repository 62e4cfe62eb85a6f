"""What most tests need together: a broker, a stream there, and a database; and the same behind lines that fail."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import Broker
from relatum.reading import Message, StreamBounds
from relatum.recording import BackfillReport, Recorder, StreamStatus, VerifyReport, backfill, status, verify
from relatum.superstreams import Layout
from tests.support._recording import Keys, reader_of, record, recorded_to, recording, rows_of, wait_recorded
from tests.support._streams import Plain, declare_stream, delete_stream, publish_plain
from tests.support._waiting import result_of
from tests.support.proxy import Proxy
from tests.support.standstill import locked


@dataclass(frozen=True)
class Place:
    """A broker, a stream there, and a database."""

    amqp: str
    stream_url: str
    database: str
    engine: sa.Engine
    stream: str
    keys: Keys = ()

    @property
    def broker(self) -> Broker:
        return Broker(self.amqp, stream_url=self.stream_url)

    def put(self, *messages: Plain, to: str | None = None) -> None:
        publish_plain(self.amqp, to or self.stream, messages)

    def put_recorded(self, *messages: Plain, to: str | None = None, keys: Keys | None = None) -> None:
        self.put(*messages, to=to)
        self.record(to or self.stream, keys=keys)

    def record(self, *streams: str, keys: Keys | None = None) -> None:
        """Record all that is in the stream, or in others, now: by the file's `KEYS`, or by others."""
        record(self.amqp, self.engine, *(streams or (self.stream,)), keys=self.keys if keys is None else keys)

    def record_partitions(self, layout: Layout) -> None:
        """Record a super stream by its name, all that is in its partitions now."""
        with self.recording(layout.super_stream):
            for each in layout:
                wait_recorded(self.amqp, self.engine, each.stream)

    def recording(self, *streams: str, keys: Keys | None = None) -> AbstractContextManager[Recorder]:
        """Record the stream, or others, until the block ends: by the file's `KEYS`, or by others."""
        given = self.keys if keys is None else keys
        return recording(self.amqp, self.engine, *(streams or (self.stream,)), keys=given)

    def wait_recorded(self, stream: str | None = None) -> None:
        wait_recorded(self.amqp, self.engine, stream or self.stream)

    def recorded_to(self, stream: str | None = None) -> int:
        return recorded_to(self.engine, stream or self.stream)

    def rows(self, stream: str | None = None) -> list[tuple[str, str, int]]:
        """What is recorded of a stream: (key, value, offset), in order of offsets and keys."""
        return rows_of(self.engine, stream or self.stream)

    def values(self) -> list[str]:
        return [value for _, value, _ in self.rows()]

    def bounds(self, stream: str | None = None) -> StreamBounds:
        with reader_of(self.amqp) as reader:
            return reader.bounds(stream or self.stream)

    def backfill(self, **options: Any) -> BackfillReport:
        return backfill(self.amqp, self.engine.url, self.stream, **options)

    def status(self, stream: str | None = None) -> StreamStatus:
        (seen,) = status(self.amqp, self.engine.url, [stream or self.stream])
        return seen

    def verify(self, **options: Any) -> VerifyReport:
        return verify(self.amqp, self.engine.url, [self.stream], **options)

    def declare_again(self, **arguments: Any) -> None:
        delete_stream(self.amqp, self.stream)
        declare_stream(self.amqp, self.stream, **arguments)

    def sql(self, statement: str, **parameters: Any) -> list[Any]:
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return list(result) if result.returns_rows else []

    def messages(self, stream: str | None = None) -> list[Message]:
        with reader_of(self.amqp) as reader:
            return list(reader.iterate(stream or self.stream))


class FailingPlace:
    """A place over lines that can fail, and a face to call; `took_s` is how long calls took during the last fault."""

    def __init__(self, place: Place, face: str) -> None:
        self.place, self.is_async = place, face == "asyncio"
        self._stack = ExitStack()
        self._runner = self._stack.enter_context(asyncio.Runner())
        urls = (place.amqp, place.stream_url, place.database)
        *self._broker, self._database = [self._stack.enter_context(Proxy.to(url)) for url in urls]
        self.amqp, self.stream_url = (line.url(url) for line, url in zip(self._broker, urls, strict=False))
        self.broker = Broker(self.amqp, stream_url=self.stream_url)
        self.database = self._database.url(place.database)
        self.took_s = 0.0

    def go(self, result: Any) -> Any:
        return result_of(self._runner, result)

    def enter(self, manager: Any) -> Any:
        return self._stack.enter_context(manager)

    def at_end(self, close: Callable[..., Any], *arguments: Any) -> None:
        self._stack.callback(lambda: self.go(close(*arguments)))

    @contextmanager
    def fault(self, fault: str, error: type[Exception] | None = None) -> Iterator[None]:
        """Time a block, ending with `error`, under "broker frozen", "database frozen", "… refused" or "locked T…"."""
        lines = self._broker if fault.startswith("broker") else [self._database]
        with ExitStack() as faulty:
            if fault.startswith("locked"):
                faulty.enter_context(locked(self.place.database, *fault.split()[1:]))
            for line in [] if fault.startswith("locked") else lines:
                faulty.callback(_let_pass, line)
                if fault.endswith("frozen"):
                    line.mode = "frozen"
                else:
                    line.accepts = False
                    line.cut()
            began = time.monotonic()
            with nullcontext() if error is None else pytest.raises(error):
                yield
            self.took_s = time.monotonic() - began

    def close(self) -> None:
        self._stack.close()


def _let_pass(line: Proxy) -> None:
    line.mode, line.accepts = "pass", True
