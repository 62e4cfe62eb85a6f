"""The table of waits in docs/answers.md: each ends when it says, with what it says, where the broker stands still."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import isasyncgen, isawaitable
from pathlib import Path
from typing import Any

import aio_pika
import pytest
import sqlalchemy as sa

import relatum
from pyspark_relatum import DefaultSource
from relatum.collecting import AsyncMessageCollector, AsyncOutcomes, MessageCollector, Outcomes
from relatum.contexts import AsyncSerialConsumer, SerialConsumer
from relatum.errors import (
    BrokerUnavailable,
    NotFinishedInTime,
    NotRecordedInTime,
    ReadTimeout,
    RelatumError,
    Transient,
)
from relatum.membership import GROUP_KEY
from relatum.reading import BrokerAddress
from relatum.recording import Recorder
from relatum_consumer import AsyncRelations, Relations
from tests.support import broker_connection, in_a_try, publish_plain, record, until_answered, wait_recorded
from tests.support.groups import of_group, whole_group
from tests.support.proxy import Proxy
from tests.support.relations import FACES
from tests.support.serial_consuming import serial_bed

WAIT_S = 0.5
"""What is asked for."""

BUSY_S = 1.0
"""What a busy machine may take more."""

ROW = re.compile(r"^\| `(?P<wait>[^`]+)`.*?\| (?P<late_s>[\d.]+) s later \|", re.MULTILINE)

DOCUMENTED = {
    found["wait"]: float(found["late_s"])
    for found in ROW.finditer((Path(__file__).parents[2] / "docs" / "answers.md").read_text())
}
"""The waits of the table, and by how much later they end at most."""


class Bed:
    """A broker behind lines that can stand still, a database, and a face."""

    def __init__(self, face: str, urls: tuple[str, str], database_url: str, engine: sa.Engine, stream: str) -> None:
        self.is_async = face == "asyncio"
        self.amqp_url, self.stream_url = urls
        self.database_url, self.engine, self.stream = database_url, engine, stream
        self._stack = ExitStack()
        self._runner = self._stack.enter_context(asyncio.Runner())
        self._lines = [self._stack.enter_context(Proxy.to(url)) for url in urls]
        self.address = BrokerAddress.parse(*(line.url(url) for line, url in zip(self._lines, urls, strict=True)))
        self.took_s = 0.0

    def go(self, result: Any) -> Any:
        """What a call gave, or what it gives on the event loop."""
        if isasyncgen(result):
            return self._runner.run(_listed(result))
        return self._runner.run(_awaited(result)) if isawaitable(result) else result

    def at_end(self, close: Callable[[], Any]) -> None:
        """Have something closed at the end."""
        self._stack.callback(lambda: self.go(close()))

    @contextmanager
    def frozen(self, error: type[RelatumError] | None = None) -> Iterator[None]:
        """The broker stands still; what is inside is timed, and ends with that error, if any."""
        for line in self._lines:
            line.mode = "frozen"
        began = time.monotonic()
        try:
            with nullcontext() if error is None else pytest.raises(error):
                yield
            self.took_s = time.monotonic() - began
        finally:
            for line in self._lines:
                line.mode = "pass"

    def relations(self, **options: Any) -> Any:
        """Look-ups of the face."""
        made = (AsyncRelations if self.is_async else Relations)(self.address, self.database_url, **options)
        self.at_end(made.close)
        return made

    def receipt(self) -> Any:
        """Of a message that was published by way of no line, and that nobody records."""
        options: dict[str, Any] = {"database": self.database_url, "recorder": "external"}
        options |= {"broker_url": self.address_url(0), "stream_url": self.address_url(1)}
        if self.is_async:
            connection = self.go(aio_pika.connect(self.amqp_url))
            self.at_end(connection.close)
            relatum.intercept(connection, **options)
            self._stack.callback(relatum.release, connection)
            return self.go(_published(connection, self.stream))
        plain = self._stack.enter_context(broker_connection(self.amqp_url))
        relatum.intercept(plain, **options)
        self._stack.callback(relatum.release, plain)
        return relatum.publish(plain.channel(), "", self.stream, b"a")

    def address_url(self, which: int) -> str:
        """A URL by way of a line."""
        return self._lines[which].url((self.amqp_url, self.stream_url)[which])

    def collector(self) -> Any:
        """A collector that has started."""
        made = (AsyncMessageCollector if self.is_async else MessageCollector)(
            "waits", database=self.database_url, broker=self.address, streams=[self.stream], type_of=lambda _: "any"
        )
        made.register_executor("any", lambda _: None)
        self.at_end(made.close)
        self.go(made.start())
        return made

    def consumer(self) -> Any:
        """A serial consumer that has started."""
        bed = self._stack.enter_context(serial_bed(self.amqp_url, self.engine))
        kind = AsyncSerialConsumer if self.is_async else SerialConsumer
        made = kind(bed.name, "waits", database=self.database_url, broker=self.address)
        self.at_end(made.close)
        self.go(made.start())
        bed.publish(0, "a", "1")
        batch = self.go(made.next_batch(90.0))
        self.go(batch.acknowledge())
        return made

    def close(self) -> None:
        """Close all."""
        self._stack.close()


async def _published(connection: Any, stream: str) -> Any:
    return await relatum.publish_async(await connection.channel(), aio_pika.Message(b"a"), stream)


async def _awaited(what: Any) -> Any:
    return await what


async def _listed(what: Any) -> list[Any]:
    return [each async for each in what]


def _complete(bed: Bed) -> None:
    relations = bed.relations(timeout_s=WAIT_S)
    until_answered(lambda: bed.go(relations.find("order_id", 1, complete=True)))
    publish_plain(bed.amqp_url, bed.stream, [b"more"])
    with bed.frozen(Transient):
        bed.go(relations.find("order_id", 1, complete=True))


def _receipt(bed: Bed) -> None:
    receipt = bed.receipt()
    with pytest.raises(NotRecordedInTime):
        bed.go(receipt.wait(0.0))
    with bed.frozen(NotRecordedInTime):
        bed.go(receipt.wait(WAIT_S))


def _settle(bed: Bed) -> None:
    receipt = bed.receipt()
    assert len(bed.go(receipt.settle())) == 1
    with bed.frozen(BrokerUnavailable):
        bed.go(receipt.settle(WAIT_S))


def _outcome(bed: Bed) -> None:
    receipt = bed.receipt()
    with bed.frozen(NotFinishedInTime):
        bed.go(receipt.outcome(WAIT_S))


def _outcomes(bed: Bed) -> None:
    outcomes = (AsyncOutcomes if bed.is_async else Outcomes)(bed.database_url)
    bed.at_end(outcomes.close)
    with bed.frozen(NotFinishedInTime):
        bed.go(outcomes.wait("nobody's", WAIT_S))


def _collector(bed: Bed) -> None:
    collector = bed.collector()
    with bed.frozen():
        assert bed.go(collector.close(WAIT_S)) in (True, False)


def _consumer(bed: Bed) -> None:
    consumer = bed.consumer()
    with bed.frozen():
        assert bed.go(consumer.close(WAIT_S)) in (True, False)


def _next_batch(bed: Bed) -> None:
    consumer = bed.consumer()
    with bed.frozen():
        assert bed.go(consumer.next_batch(WAIT_S)) is None


def _messages(bed: Bed) -> None:
    consumer = bed.consumer()
    with bed.frozen():
        assert list(bed.go(consumer.messages(WAIT_S))) == []


def _groups(bed: Bed) -> None:
    relations = bed.relations(timeout_s=WAIT_S)
    following = {"follow": True, "idle_timeout_s": WAIT_S}
    until_answered(lambda: list(bed.go(relations.groups(bed.stream, **following))))
    with bed.frozen(Transient):
        list(bed.go(relations.groups(bed.stream, **following)))


def _recorder(bed: Bed) -> None:
    stop = threading.Event()
    recorder = Recorder(bed.address, bed.database_url, [bed.stream], keys=["order_id"])
    running = threading.Thread(target=recorder.run, args=[stop], name="a recorder's", daemon=True)
    running.start()
    wait_recorded(bed.amqp_url, bed.engine, bed.stream)
    with bed.frozen():
        stop.set()
        running.join(90)
    assert not running.is_alive()
    bed.took_s += WAIT_S


def _spark(bed: Bed) -> None:
    publish_plain(bed.amqp_url, bed.stream, [b"x" * 10_000] * 300)
    options = {"broker": bed.address_url(0), "streamUrl": bed.address_url(1), "stream": bed.stream, "batchRows": "1"}
    source = DefaultSource(options | {"pollTimeoutMs": str(round(WAIT_S * 1000))})
    reader = source.reader(source.schema())
    (partition,) = until_answered(reader.partitions)
    batches: Any = reader.read(partition)
    until_answered(lambda: next(batches))
    with bed.frozen(ReadTimeout):
        list(batches)


WAITS: dict[str, Callable[[Bed], None]] = {
    "Relations(timeout_s=)": _complete,
    "receipt.wait(timeout_s)": _receipt,
    "settle(timeout_s)": _settle,
    "receipt.outcome(timeout_s)": _outcome,
    "Outcomes.wait(…, timeout_s)": _outcomes,
    "MessageCollector.close(timeout_s)": _collector,
    "SerialConsumer.close(timeout_s)": _consumer,
    "next_batch(timeout_s)": _next_batch,
    "messages(timeout_s)": _messages,
    "groups(follow=True, idle_timeout_s=)": _groups,
    "Recorder.run(stop)": _recorder,
    "pollTimeoutMs": _spark,
}

BLOCKING_ALONE = ("Recorder.run(stop)", "pollTimeoutMs")

CASES = [(wait, face) for wait in WAITS for face in FACES if face == "blocking" or wait not in BLOCKING_ALONE]


@pytest.fixture
def bed(
    face: str, amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> Iterator[Bed]:
    """With a recorded stream: an order, a whole group, and a part of one."""
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": 1}), *whole_group(1, 2), of_group(2, 1)])
    record(amqp_url, engine, stream_name, keys=["order_id", GROUP_KEY])
    made = Bed(face, (amqp_url, stream_url), database_url, engine, stream_name)
    yield made
    made.close()


@pytest.mark.parametrize(("wait", "face"), CASES)
def test_each_wait_ends_when_the_table_says(wait: str, bed: Bed) -> None:
    """With a broker that stands still in the middle, it has said what it says by then."""

    def is_in_time() -> bool:
        WAITS[wait](bed)
        return bed.took_s < WAIT_S + DOCUMENTED[wait] + BUSY_S

    in_a_try(is_in_time, what=f"{wait} ended in time")


def test_the_table_names_the_waits_that_are_measured() -> None:
    """No row without its test; `wait_related` has a file of its own."""
    assert set(DOCUMENTED) == {*WAITS, "wait_related(timeout_s=)"}
